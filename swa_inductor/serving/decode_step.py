"""A decode step of many sequences as one compiled function, and one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend

from swa_inductor.api_metadata import prepare_decode
from swa_inductor.errors import require
from swa_inductor.metadata import PreparedDecode
from swa_inductor.serving._drafts import lookup, verify
from swa_inductor.serving._pinned import HostBuffer, HostRing
from swa_inductor.serving._sequences import SequenceState
from swa_inductor.serving.model import SlotModel

_IN_FLIGHT = 8
"""Results that may be unread without a launch having to wait for the oldest."""

_COUNTS = 4
"""Columns of a result behind its D tokens: tokens kept, finished, drafts tried, refused."""

Sampler = Callable[[Tensor], Tensor]
"""From logits [B, D, V] to token ids, int64 [B, D]; compiled into the step."""


class StepTokens(NamedTuple):
    """What a step produced, one entry per row that was launched (padding that `launch` added left out).

    tokens: the generated tokens, in order; none for a padded row (slot -1), a sequence that had finished before, or a
        refused one.
    finished: no more tokens will come: the limit or EOS is reached, by this step or before; true for a padded row.
    drafts: draft tokens that were tried; accepted_drafts: tokens that the step gained by them, len(tokens) - 1.
    refused: the state of the sequence on the device was not valid (see `prepare_decode`), so it was not run.
    """

    tokens: list[list[int]]
    finished: list[bool]
    drafts: list[int]
    accepted_drafts: list[int]
    refused: list[bool]


class StepResult:
    """Tokens of a step that is on its way: they arrive in pinned host memory without anybody waiting.

    Attributes:
        slots: as they were launched. bucket: rows of the step; 0 for an admission.
    """

    def __init__(self, slots: Sequence[int], bucket: int) -> None:
        self.slots, self.bucket = tuple(slots), bucket
        self.buffer: HostBuffer | None = None
        self._tokens: StepTokens | None = None

    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return self.buffer is None or self.buffer.ready()

    def read(self) -> StepTokens:
        """Wait for this step, not for later ones, and return its tokens. May be called again."""
        if self._tokens is None:
            assert self.buffer is not None  # until it has been read
            rows = self.buffer.wait()[: len(self.slots)].tolist()
            kept, finished, drafts, refused = ([row[i - _COUNTS] for row in rows] for i in range(_COUNTS))
            self._tokens = StepTokens(
                [row[:n] for row, n in zip(rows, kept, strict=True)],
                list(map(bool, finished)),
                drafts,
                [max(n - 1, 0) for n in kept],
                list(map(bool, refused)),
            )
            self.buffer = None
        return self._tokens


class _Rows(NamedTuple):
    """What the rows of a bucket have of their own, at fixed addresses.

    state_ids: int32 [B], -1 for padding. results: int64 [B, D + 4], written. prepared: metadata of the step, written.
    """

    state_ids: Tensor
    results: Tensor
    prepared: PreparedDecode


@contextmanager
def _inference(device: torch.device) -> Iterator[None]:
    """One mode for all calls, whatever the caller's: compiled code depends on it, and state must stay writable."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), current:
        yield


class DecodeStep:
    """Decode steps of up to max(buckets) sequences, which the host launches without knowing how far they have come.

    A step gathers the state of its sequences by slot, drafts tokens by looking the last ones up in their history,
    makes the metadata (`prepare_decode`), runs the layers, samples, accepts drafts as long as they equal the sampled
    token, and writes tokens and counts back, all on the device. A sequence that has reached its limit or EOS is
    padding from then on: it may be launched again, and writes no byte.

    Calls go to the current stream: use the same one for `admit`, `launch` and the prefill of the model.

    Args:
        model: what to run; D is its `spec.tokens_per_step`.
        buckets: numbers of sequences to compile for; a launch is padded to the next one.
        drafts: draft tokens per sequence at most; default and maximum D - 1, 0 for plain decoding. The step has D rows
            per sequence whatever it is.
        ngram: tokens of the longest run that is looked up (`_drafts.lookup`).
        sample: tokens from logits [B, D, V], int64 [B, D]; default the argmax. Drafts are deterministic, so accepting
            them while they equal the sampled tokens gives exactly the distribution of plain sampling.
        eos_token_id: token after which a sequence is finished.
        compile: torch.compile the step, once per bucket. False runs it eagerly: slow, for tests.
        graphs: capture one CUDA graph per bucket; default: on CUDA, if compiled.

    Attributes:
        model, buckets (ascending), drafts, sequences.
        compiles: buckets compiled. recordings: graphs captured, 0 on the CPU. replays: steps launched as a graph.
        launches: steps launched, by bucket.

    Raises:
        InvalidArgumentError: an argument out of range.
    """

    def __init__(
        self,
        model: SlotModel,
        *,
        buckets: Sequence[int],
        drafts: int | None = None,
        ngram: int = 3,
        sample: Sampler | None = None,
        eos_token_id: int | None = None,
        compile: bool = True,
        graphs: bool | None = None,
    ) -> None:
        width = model.spec.tokens_per_step
        device = torch.device(model.device)
        cuda = device.type == "cuda"
        drafts = width - 1 if drafts is None else drafts
        graphs = cuda and compile if graphs is None else graphs
        sizes = sorted(set(buckets))
        require(len(sizes) > 0 and sizes[0] >= 1, "buckets", list(buckets), "at least one integer of at least 1")
        require(0 <= drafts < width, "drafts", drafts, f"0 to D - 1 = {width - 1}")
        require(ngram >= 1, "ngram", ngram, "an integer of at least 1")
        require(not graphs or (cuda and compile), "graphs", graphs, "False on a CPU and where nothing is compiled")
        if eos_token_id is not None:
            require(0 <= eos_token_id < model.vocab_size, "eos_token_id", eos_token_id, f"0 to {model.vocab_size - 1}")
        self.model, self.buckets, self.drafts, self.ngram, self.eos_token_id = model, sizes, drafts, ngram, eos_token_id
        self.compiles = self.recordings = self.replays = 0
        self.launches = dict.fromkeys(sizes, 0)
        self._sample = _greedy if sample is None else sample
        self._width, self._device = width, device
        with _inference(self._device):
            self.sequences = SequenceState(model.num_slots, model.max_length, width, device)
            self._ring = HostRing(_IN_FLIGHT, sizes[-1], width + _COUNTS, device)
            self._rows = {
                size: _Rows(
                    torch.full((size,), -1, dtype=torch.int32, device=device),
                    torch.zeros(size, width + _COUNTS, dtype=torch.int64, device=device),
                    PreparedDecode.allocate(model.spec, size, device=device),
                )
                for size in sizes
            }
        self._run: Callable[[_Rows], None] = self._step
        if compile:
            self._run = torch.compile(self._step, fullgraph=True, dynamic=False, backend=self._backend)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._warm = False

    def warm_up(self) -> None:
        """Compile every bucket, the largest first, and capture its graph. Runs padded rows only: no state changes.

        Idempotent; `launch` calls it where it was not called. Synchronises.
        """
        if self._warm:
            return
        unlimited = dynamo_config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30)
        with _inference(self._device), unlimited:
            if self._graphs is None:
                for size in reversed(self.buckets):
                    self._run(self._rows[size])
            else:
                self._capture(self._graphs)
        self._warm = True

    def _capture(self, graphs: dict[int, torch.cuda.CUDAGraph]) -> None:
        """Run every bucket once, so that nothing is compiled or loaded in a capture, then capture it."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for size in reversed(self.buckets):
                self._run(self._rows[size])
        current.wait_stream(stream)
        pool = torch.cuda.graph_pool_handle()  # one for all: steps run one after the other and keep nothing in it
        for size in reversed(self.buckets):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._run(self._rows[size])
            graphs[size] = graph
            self.recordings += 1

    def sample_first(self, logits: Tensor) -> Tensor:
        """Tokens int64 [n] from logits [n, V] of a prefill, by the sampler of the step; for `admit`. No sync."""
        return self._sample(logits[:, None])[:, 0]

    def admit(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        first: Tensor,
        *,
        limits: Sequence[int],
        valid_start: Sequence[int] | None = None,
    ) -> StepResult:
        """Set the state of new sequences, whose prompts a prefill has stored, without a synchronisation.

        A sequence of n prompt tokens and limit L generates exactly L - n tokens, fewer with EOS: `first`, the others by
        steps. It may be launched right afterwards, before the result is read. Also for a sequence that goes on after
        its slot was taken from it: its prompt is then all its tokens.

        Args:
            slots: 0 to S - 1, each once, none of them in a step that may still write (see `SlotAllocator`).
            prompts: the stored tokens of each sequence, at least 1.
            first: int64 [n], on the device of the model: the token of each sequence after the prompt.
            limits: tokens at which each sequence is finished, prompt and generated: len(prompt) + 1 to max_length.
            valid_start: first position that may be read; default 0, up to len(prompt).

        Returns:
            A result whose tokens are the first ones: [[first], ...], with `finished` true where it is EOS or the limit
            is len(prompt) + 1.

        Raises:
            InvalidArgumentError: lists of different lengths, or a value out of range. Nothing was written.
        """
        count = len(slots)
        starts = [0] * count if valid_start is None else list(valid_start)
        self._check_admission(slots, prompts, first, limits, starts)
        lengths = [len(prompt) for prompt in prompts]
        result = StepResult(slots, 0)
        with _inference(self._device):
            numbers = [*slots, *lengths, *limits, *starts, *(token for prompt in prompts for token in prompt)]
            # Pinned memory of torch is not reused before the copies from it are over.
            pinned = self._device.type == "cuda"
            staged = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(self._device, non_blocking=True)
            at, length, limit, start = staged[: 4 * count].view(4, count)
            s = self.sequences
            for slot, tokens in zip(slots, staged[4 * count :].split(lengths), strict=True):
                s.tokens[slot, : len(tokens)].copy_(tokens)
            s.tokens[at, length] = first
            if self.eos_token_id is not None:
                limit = torch.where(first == self.eos_token_id, length + 1, limit)
            s.lengths[at], s.limits[at], s.valid_start[at] = length, limit, start.to(torch.int32)
            s.accepted.index_fill_(0, at, 0)
            rows = F.pad(first[:, None], (0, self._width - 1 + _COUNTS))
            rows[:, -_COUNTS].fill_(1)
            rows[:, 1 - _COUNTS] = length + 1 >= limit
            result.buffer = HostBuffer(count, rows.shape[1], self._device)
            result.buffer.results.copy_(rows, non_blocking=True)
            result.buffer.record()
        return result

    def _check_admission(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        first: Tensor,
        limits: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        count = len(slots)
        lists: dict[str, Sequence[object]] = {"prompts": prompts, "limits": limits, "valid_start": starts}
        for name, values in lists.items():
            require(len(values) == count, f"{name} length", len(values), f"{count}, that of slots")
        good = (
            first.dtype == torch.int64
            and tuple(first.shape) == (count,)
            and first.device == self.sequences.limits.device
        )
        got = f"{first.dtype} {tuple(first.shape)} on {first.device}"
        require(good, "first", got, f"torch.int64 ({count},) on {self._device}")
        self._check_slots(slots, 0)
        longest, vocabulary = self.model.max_length, self.model.vocab_size
        for i, prompt in enumerate(prompts):
            length = len(prompt)
            require(1 <= length < longest, f"prompts[{i}] length", length, f"1 to max_length - 1 = {longest - 1}")
            require(length < limits[i] <= longest, f"limits[{i}]", limits[i], f"{length + 1} to max_length={longest}")
            require(0 <= starts[i] <= length, f"valid_start[{i}]", starts[i], f"0 to {length}")
            wrong = [token for token in prompt if not 0 <= token < vocabulary]
            require(not wrong, f"prompts[{i}]", wrong, f"tokens 0 to {vocabulary - 1}")

    def _check_slots(self, slots: Sequence[int], least: int) -> None:
        count = self.model.num_slots
        for i, slot in enumerate(slots):
            require(least <= slot < count, f"slots[{i}]", slot, f"{least} to {count - 1}")
        real = [slot for slot in slots if slot >= 0]
        require(len(set(real)) == len(real), "slots", list(slots), "each slot once")

    def launch(self, slots: Sequence[int]) -> StepResult:
        """Launch one step of the sequences in `slots`; no synchronisation, and after warm-up no allocation.

        With 8 results unread, it waits for the oldest and reads it: none is lost.

        Args:
            slots: 0 to S - 1, each at most once; -1 for a padded row.

        Raises:
            InvalidArgumentError: more sequences than the largest bucket, or slots out of range or repeated. Nothing was
                launched.
        """
        count = len(slots)
        require(count <= self.buckets[-1], "slots", f"{count} sequences", f"{self.buckets[-1]}, the largest bucket")
        self._check_slots(slots, -1)
        self.warm_up()
        size = next(size for size in self.buckets if size >= count)
        result = StepResult(slots, size)
        result.buffer = buffer = self._ring.take(result.read)
        rows = self._rows[size]
        with _inference(self._device):
            buffer.state_ids[:size] = torch.tensor([*slots, *[-1] * (size - count)], dtype=torch.int32)
            rows.state_ids.copy_(buffer.state_ids[:size], non_blocking=True)
            if self._graphs is None:
                self._run(rows)
            else:
                self._graphs[size].replay()
                self.replays += 1
            buffer.results[:size].copy_(rows.results, non_blocking=True)
            buffer.record()
        self.launches[size] += 1
        return result

    def error_count(self) -> int:
        """Sequences refused so far because their state on the device was not valid. Synchronises."""
        return sum(int(rows.prepared.errors) for rows in self._rows.values())

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiles += 1
        inductor: Callable[..., Any] = lookup_backend("inductor")
        return inductor(graph, inputs, config_patches={"triton.cudagraphs": False})  # the graphs are ours

    def _step(self, batch: _Rows) -> None:
        """The step itself. What differs from step to step is in tensors; a row that does not run changes nothing.

        Padded rows all write entry S, the same values each.
        """
        model, s, width = self.model, self.sequences, self._width
        state_ids = batch.state_ids
        rows = torch.where(state_ids < 0, model.num_slots, state_ids).to(torch.int64)
        lengths, accepted, limits = s.lengths[rows], s.accepted[rows], s.limits[rows]
        first = lengths + accepted.clamp(min=0)
        wanted = (state_ids >= 0) & (first + 1 < limits)
        at = first.clamp(0, model.max_length - 1)  # a wrong length leads nowhere
        history = s.tokens[rows]
        tokens, counts = history.gather(1, at[:, None]), torch.zeros_like(accepted)
        if self.drafts:
            drafts, counts = lookup(history[:, : model.max_length], at, self.ngram, self.drafts)
            counts = torch.minimum(counts, limits - first - 2).clamp(min=0).to(torch.int32)  # none behind the limit
            tokens = torch.cat([tokens, drafts], 1)
        tokens = F.pad(tokens, (0, width - tokens.shape[1]))
        metadata, new_lengths, _ = prepare_decode(
            lengths,
            accepted,
            torch.where(wanted, state_ids, -1),
            spec=model.spec,
            num_slots=model.num_slots,
            valid_start=s.valid_start[rows],
            draft_counts=counts,
            out=batch.prepared,
        )
        runs = metadata.state_ids.view(-1, width)[:, 0] >= 0
        logits = model.decode(tokens.flatten(), metadata)
        sampled = self._sample(logits.view(-1, width, logits.shape[-1]))
        good = sampled.dtype == torch.int64 and sampled.shape == tokens.shape
        require(good, "sample", f"{sampled.dtype} {tuple(sampled.shape)}", f"torch.int64 {tuple(tokens.shape)}")
        kept = torch.where(runs, verify(tokens, sampled, counts, limits - first - 1, self.eos_token_id), 0)
        column = torch.arange(width, device=state_ids.device)
        taken = column < kept[:, None]
        if self.eos_token_id is not None:
            ended = (taken & (sampled == self.eos_token_id)).any(1)
            limits = torch.where(ended, first + 1 + kept, limits)
            s.limits[rows] = limits
        s.tokens[rows[:, None], at[:, None] + 1 + column] = torch.where(taken, sampled, 0)
        s.accepted[rows] = torch.where(runs, kept, accepted)
        s.lengths[rows] = new_lengths
        notes = [kept, first + 1 + kept >= limits, torch.where(runs, counts, 0), wanted & ~runs]
        batch.results.copy_(torch.cat([torch.where(taken, sampled, -1), *(note[:, None] for note in notes)], 1))


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)
