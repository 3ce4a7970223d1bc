"""Continuous batching: requests take slots, are prefilled in chunks, decode together, finish, and give their slots up.

The host runs one step ahead of the device: it launches step n + 1 before it reads the tokens of step n, and never needs
to know how far a sequence has come. So it learns one step late that a sequence has finished; the row that this sequence
has in the step in flight is padding, which the device decides, and writes nothing.

All work goes to the current stream of the device, in the order of the calls; work of one slot on two streams would need
events between them. A slot has a new owner only once every step launched before it was given up has been read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swa_inductor.errors import OutOfSlotsError, require
from swa_inductor.metadata import PrefillMetadata
from swa_inductor.serving.decode_step import DecodeStep, StepResult
from swa_inductor.serving.model import SlotModel
from swa_inductor.state import Slot, SlotAllocator

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Args:
        id: tells requests apart.
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate, at least one; fewer where EOS comes first.
        arrival: seconds after the start of the run.
    """

    id: int
    prompt: Sequence[int]
    max_new_tokens: int
    arrival: float = 0.0


@dataclass(eq=False)
class _Sequence:
    """A request on its way. `tokens` are those the host knows: the prompt, then what has been read."""

    request: Request
    tokens: list[int]
    slot: Slot | None = None
    prefilled: int = 0
    kept: int = 0  # tokens when it got its slot
    in_flight: int = 0  # results on their way that hold tokens of it

    @property
    def limit(self) -> int:
        return len(self.request.prompt) + self.request.max_new_tokens


class _Work(NamedTuple):
    """A result that nobody has read, and the sequences of its rows: rows are told apart by owner, never by slot."""

    sequences: list[_Sequence]
    result: StepResult


class Iteration(NamedTuple):
    """One turn of the loop, as the host saw it when it had launched its work.

    live: sequences with a slot. waiting: requests without one. alive_tokens: tokens of the live sequences that a
    full-length cache would hold. prefill_tokens: real tokens of the prefill call, 0 if there was none. rows, padded:
    sequences of the decode step, and rows added to reach the bucket; 0 if there was none.
    """

    live: int
    waiting: int
    alive_tokens: int
    prefill_tokens: int
    rows: int
    padded: int


@dataclass
class Statistics:
    """Counts and times of a run.

    Attributes:
        iterations: one entry per turn of the loop.
        launch_s: seconds that each call of `DecodeStep.launch` took. On a CPU that is the step itself.
        gap_s: host time between steps: seconds from the end of the wait for the last step that was read to the call of
            launch. Left out where a prefill came in between.
        preemptions: slots taken from sequences that had not finished.
        drafts, accepted_drafts: draft tokens tried, and kept.
        sequence_steps: decode rows of sequences that had not finished.
        decode_tokens: tokens that these rows generated.
    """

    iterations: list[Iteration] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    sequence_steps: int = 0
    decode_tokens: int = 0


class Engine:
    """Serves requests with one model; one thread owns it.

    Args:
        model, step: what runs: a model, and a decode step made for it.
        chunk_tokens: prompt tokens per prefill call, of one or several sequences; shorter calls are padded to it.
        overlapped: launch a step before the tokens of the step before are read. False reads each at once.
        time_slice: tokens after which a sequence gives its slot up while others wait for one. It goes to the end of the
            queue and is prefilled again from all its tokens. Default: a sequence keeps its slot until it has finished.
        compile_prefill: compile the prefill of the model, once; default: on CUDA.

    Attributes:
        finished: tokens generated for each finished request, by id.
        statistics: of everything so far.

    Raises:
        InvalidArgumentError: a step of another model, a number below 1, or more slots than the largest bucket.
    """

    def __init__(
        self,
        model: SlotModel,
        step: DecodeStep,
        *,
        chunk_tokens: int = 256,
        overlapped: bool = True,
        time_slice: int | None = None,
        compile_prefill: bool | None = None,
    ) -> None:
        require(chunk_tokens >= 1, "chunk_tokens", chunk_tokens, "an integer of at least 1")
        require(time_slice is None or time_slice >= 1, "time_slice", time_slice, "None or an integer of at least 1")
        require(step.model is model, "step", "a step of another model", "a step made for `model`")
        most = max(step.buckets)
        require(model.num_slots <= most, "num_slots", model.num_slots, f"up to {most}, the largest bucket")
        self.model, self.step = model, step
        self.chunk_tokens, self.overlapped, self.time_slice = chunk_tokens, overlapped, time_slice
        if compile_prefill is None:
            compile_prefill = model.device.type == "cuda"
        prefill: Callable[..., Tensor] = model.prefill
        self._compiled_prefill = compile_prefill
        self._prefill = torch.compile(prefill, fullgraph=True, dynamic=False) if compile_prefill else prefill
        self.finished: dict[int, list[int]] = {}
        self.statistics = Statistics()
        self._slots = SlotAllocator(model.num_slots)
        self._ids: set[int] = set()
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[_Sequence] = []
        self._decoding: list[_Sequence] = []
        self._leaving: list[_Sequence] = []  # they give their slot up once nothing of them is in flight
        self._flights: deque[tuple[int, list[_Work]]] = deque()  # step of the allocator, what the iteration launched
        self._wait_ended: float | None = None

    @property
    def busy(self) -> bool:
        """Whether a request that was submitted has not finished, or a result has not been read."""
        return bool(self._waiting or self._prefilling or self._decoding or self._flights)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile what is to be compiled, and capture the graphs of the step. Runs padded rows only; synchronises."""
        self.step.warm_up()
        if self._compiled_prefill:
            self._call_prefill([], [])

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises:
            InvalidArgumentError: an id seen before, an empty prompt, a token outside the vocabulary, no token to
                generate, or more tokens than `max_length` of the model.
        """
        self._check(request, self._ids)
        self._ids.add(request.id)
        self._waiting.append(_Sequence(request, list(request.prompt)))

    def run(
        self,
        requests: Iterable[Request],
        *,
        speed: float | None = None,
        progress: Callable[[Engine], None] | None = None,
    ) -> dict[int, list[int]]:
        """Serve all of them -> `finished`.

        Args:
            requests: in any order; they queue up by arrival.
            speed: 1 lets them arrive in real time, 2 twice as fast ...; default: all are there at once.
            progress: called after every iteration.

        Raises:
            InvalidArgumentError: a speed that is not above 0, or see `submit`. Nothing has run then.
        """
        require(speed is None or speed > 0, "speed", speed, "None or above 0")
        coming = deque(sorted(requests, key=lambda r: r.arrival))
        ids = set(self._ids)
        for request in coming:
            self._check(request, ids)
            ids.add(request.id)
        start = time.perf_counter()
        while coming or self.busy:
            now = math.inf if speed is None else (time.perf_counter() - start) * speed
            while coming and coming[0].arrival <= now:
                self.submit(coming.popleft())
            if self.busy:
                self.iterate()
                if progress is not None:
                    progress(self)
            elif speed is not None:
                self._wait_ended = None
                time.sleep((coming[0].arrival - now) / speed)
        return self.finished

    @torch.no_grad()
    def iterate(self) -> None:
        """One turn: give slots out, launch a prefill call and a decode step, read the results of the turn before."""
        self._end_time_slices()
        self._give_slots()
        prefill_tokens, admitted = self._launch_prefill()
        works = [admitted] if admitted else []
        rows = padded = 0
        if self._decoding:
            works.append(self._launch_decode())
            rows = len(self._decoding)
            padded = works[-1].result.bucket - rows
        if works:
            for sequence in [s for work in works for s in work.sequences]:
                sequence.in_flight += 1
            self._flights.append((self._slots.begin_step(), works))
        settled = self._decoding + self._leaving
        live = len(self._prefilling) + len(settled)
        alive_tokens = sum(s.prefilled for s in self._prefilling) + sum(len(s.tokens) for s in settled)
        turn = Iteration(live, len(self._waiting), alive_tokens, prefill_tokens, rows, padded)
        self.statistics.iterations.append(turn)
        unread = 1 if self.overlapped and works else 0
        while len(self._flights) > unread:
            self._read(*self._flights.popleft())

    # ------------------------------------------------------------------------------------------------ slots

    def _give_slots(self) -> None:
        while self._waiting:
            try:
                slot = self._slots.allocate()
            except OutOfSlotsError:  # or the slots that were given up are still in a step in flight
                return
            sequence = self._waiting.popleft()
            sequence.slot, sequence.prefilled, sequence.kept = slot, 0, len(sequence.tokens)
            self._prefilling.append(sequence)

    def _end_time_slices(self) -> None:
        """As many sequences as wait for a slot in vain leave the batch, of those that have had their share."""
        if self.time_slice is None:
            return
        vacant = self.model.num_slots - len(self._prefilling) - len(self._decoding)
        done = [s for s in self._decoding if len(s.tokens) - s.kept >= self.time_slice]
        for sequence in done[: max(0, len(self._waiting) - vacant)]:
            self._decoding.remove(sequence)
            self._leaving.append(sequence)
        self._requeue()

    def _requeue(self) -> None:
        """Leaving sequences whose tokens have all been read go back to the queue."""
        for sequence in [s for s in self._leaving if not s.in_flight]:
            self.statistics.preemptions += 1
            self._leaving.remove(sequence)
            self._free(sequence)
            self._waiting.append(sequence)

    def _free(self, sequence: _Sequence) -> None:
        assert sequence.slot is not None
        self._slots.free(sequence.slot)
        sequence.slot = None

    # ------------------------------------------------------------------------------------------------ launches

    def _launch_prefill(self) -> tuple[int, _Work | None]:
        """The next chunk of prompts, if any -> its tokens, and the admission of those whose prompt is complete."""
        chunk: list[tuple[_Sequence, int]] = []
        left = self.chunk_tokens
        for sequence in self._prefilling:
            count = min(left, len(sequence.tokens) - sequence.prefilled)
            if count:
                chunk.append((sequence, count))
                left -= count
        if not chunk:
            return 0, None
        self._wait_ended = None
        for sequence, count in chunk:
            sequence.prefilled += count
        ends = accumulate(n for _, n in chunk)
        complete = [(s, end - 1) for (s, _), end in zip(chunk, ends, strict=True) if s.prefilled == len(s.tokens)]
        logits = self._call_prefill(chunk, [row for _, row in complete])
        if not complete:
            return self.chunk_tokens - left, None
        new = [s for s, _ in complete]
        first = self.step.sample_first(logits[: len(new)])
        result = self.step.admit([_slot(s) for s in new], [s.tokens for s in new], first, limits=[s.limit for s in new])
        self._prefilling = [s for s in self._prefilling if s not in new]
        self._decoding += new
        return self.chunk_tokens - left, _Work(new, result)

    def _call_prefill(self, chunk: list[tuple[_Sequence, int]], rows: list[int]) -> Tensor:
        """Logits of some rows of a prefill of the last tokens, so many of each sequence, up to `prefilled`."""
        # A compiled prefill has one shape: so many sequences and rows of logits as there can be.
        most = self.model.num_slots if self._compiled_prefill else 0
        unused = max(0, most - len(chunk))
        tokens = [t for s, n in chunk for t in s.tokens[s.prefilled - n : s.prefilled]]
        tokens += [0] * (self.chunk_tokens - len(tokens))
        metadata = PrefillMetadata.build(
            self.model.spec,
            num_slots=self.model.num_slots,
            state_ids=[_slot(s) for s, _ in chunk] + [-1] * unused,
            q_lens=[n for _, n in chunk] + [0] * unused,
            k_lens=[s.prefilled for s, _ in chunk] + [0] * unused,
            num_tokens=self.chunk_tokens,
        )
        last = torch.tensor(rows + [0] * (most - len(rows)), dtype=torch.int64)
        return self._prefill(*self._upload((torch.tensor(tokens), metadata, last)))

    def _upload(self, tensors: T) -> T:
        """Host tensors to the device, without waiting: pinned memory is not reused before its copy has run."""
        device = self.model.device
        if device.type != "cuda":
            return pytree.tree_map(lambda t: t.to(device), tensors)
        return pytree.tree_map(lambda t: t.pin_memory().to(device, non_blocking=True), tensors)

    def _launch_decode(self) -> _Work:
        start = time.perf_counter()
        if self._wait_ended is not None:
            self.statistics.gap_s.append(start - self._wait_ended)
        result = self.step.launch([_slot(s) for s in self._decoding])
        self.statistics.launch_s.append(time.perf_counter() - start)
        return _Work(list(self._decoding), result)

    # ------------------------------------------------------------------------------------------------ results

    def _read(self, number: int, works: list[_Work]) -> None:
        """Wait for what an iteration launched, and take note of its tokens."""
        outcomes = [(work, work.result.read()) for work in works]
        self._wait_ended = time.perf_counter()
        self._slots.settle(number)
        seen = self.statistics
        for work, outcome in outcomes:
            for i, sequence in enumerate(work.sequences):
                sequence.in_flight -= 1
                if outcome.refused[i]:
                    raise RuntimeError(f"request {sequence.request.id}: its state on the device is not valid")
                if sequence.slot is None:  # it finished the step before, and was padding in this one
                    continue
                sequence.tokens += outcome.tokens[i]
                if work.result.bucket:
                    seen.sequence_steps += 1
                    seen.decode_tokens += len(outcome.tokens[i])
                    seen.drafts += outcome.drafts[i]
                    seen.accepted_drafts += outcome.accepted_drafts[i]
                if outcome.finished[i]:
                    self._finish(sequence)
        self._requeue()

    def _finish(self, sequence: _Sequence) -> None:
        (self._leaving if sequence in self._leaving else self._decoding).remove(sequence)
        self._free(sequence)
        self.finished[sequence.request.id] = sequence.tokens[len(sequence.request.prompt) :]

    def _check(self, request: Request, ids: set[int]) -> None:
        name, prompt, most = f"request {request.id}", request.prompt, self.model.max_length
        require(request.id not in ids, "request id", request.id, "one not seen before")
        require(len(prompt) >= 1, f"{name} prompt", "no token", "at least one")
        ok = min(prompt) >= 0 and max(prompt) < self.model.vocab_size
        require(ok, f"{name} prompt", f"tokens {min(prompt)} to {max(prompt)}", f"0 to {self.model.vocab_size - 1}")
        require(request.max_new_tokens >= 1, f"{name} max_new_tokens", request.max_new_tokens, "at least 1")
        total = len(prompt) + request.max_new_tokens
        require(total <= most, f"{name} tokens", total, f"up to max_length={most}, prompt and generated")


def _slot(sequence: _Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot.id
