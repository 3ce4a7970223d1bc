"""What the serving tests share: a tiny model, prefill, a host that drives a DecodeStep, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

import swa_inductor as swa
from swa_inductor.serving import DecodeStep, SlotModel, SmallModel, StepResult, StepTokens

VOCAB = 24  # few tokens: they repeat, so there are drafts, right and wrong ones


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(**changes) -> SmallModel:
    """One layer, a window of 16, dense parts in fp64; every ring full of NaN codes."""
    options = {
        "num_slots": 5,
        "max_length": 96,
        "tokens_per_step": 4,
        "vocab_size": VOCAB,
        "hidden": 32,
        "layers": 1,
        "window": 16,
        "dense_dtype": torch.float64,
    }
    model = SmallModel(**{**options, **changes})
    model.state.fill_(0xFF)
    return model


def prompt(length: int, seed: int = 0, vocabulary: int = VOCAB) -> list[int]:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def prefill(model: SlotModel, parts: list[tuple[int, list[int], int]], padding: int = 0) -> torch.Tensor:
    """One prefill of several (slot, tokens so far, of which are new); logits [n, V] of the last token of each."""
    tokens = [token for _, all_tokens, new in parts for token in all_tokens[len(all_tokens) - new :]]
    metadata = swa.PrefillMetadata.build(
        model.spec,
        num_slots=model.num_slots,
        state_ids=[slot for slot, _, _ in parts],
        q_lens=[new for _, _, new in parts],
        k_lens=[len(all_tokens) for _, all_tokens, _ in parts],
        num_tokens=len(tokens) + padding,
        device=model.device,
    )
    ends = torch.tensor([new for _, _, new in parts]).cumsum(0) - 1
    packed = torch.tensor(tokens + [0] * padding)
    return model.prefill(packed.to(model.device), metadata, ends.to(model.device))


class Host:
    """Drives a step as an engine does, and keeps the tokens of each sequence, by slot."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.prompts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.generated: dict[int, list[int]] = {}
        self.finished: dict[int, bool] = {}
        self.drafts = self.accepted = 0

    def join(self, slot: int, tokens: list[int], limit: int, chunk: int = 30) -> StepResult:
        """Prefill in chunks, then admit. The result must be taken before those of later launches."""
        for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
            start = (end - 1) // chunk * chunk
            logits = prefill(self.step.model, [(slot, tokens[:end], end - start)], padding=2)
        self.prompts[slot], self.limits[slot], self.generated[slot] = tokens, limit, []
        return self.step.admit([slot], [tokens], self.step.sample_first(logits), limits=[limit])

    def take(self, result: StepResult) -> StepTokens:
        read = result.read()
        assert not any(read.refused)
        for slot, tokens, finished, drafts in zip(result.slots, read.tokens, read.finished, read.drafts, strict=True):
            if slot >= 0:
                room = self.limits[slot] - len(self.prompts[slot]) - len(self.generated[slot])
                assert drafts <= max(room - 1, 0), "drafts that could not be kept"
                assert not (tokens and self.finished.get(slot) and result.bucket), "a finished sequence goes on"
                self.generated[slot] += tokens
                self.finished[slot] = finished
            else:
                assert (tokens, finished) == ([], True)
        self.drafts += sum(read.drafts)
        self.accepted += sum(read.accepted_drafts)
        return read

    def start(self, slot: int, tokens: list[int], limit: int, **kwargs) -> None:
        self.take(self.join(slot, tokens, limit, **kwargs))

    def run(self, slots: list[int]) -> StepTokens:
        return self.take(self.step.launch(slots))

    def finish(self, slots: list[int]) -> None:
        while not all(self.finished[slot] for slot in slots):
            self.run(slots)

    def check(self, slot: int, eos: int | None = None) -> None:
        """The tokens are those that the model alone, without rings and drafts, would have chosen, all of them."""
        tokens, generated = self.prompts[slot], self.generated[slot]
        logits = self.step.model.reference_logits(tokens + generated)
        assert generated == logits.argmax(-1)[len(tokens) - 1 : -1].tolist()
        if self.finished[slot]:
            ended = eos is not None and generated[-1] == eos
            assert ended or len(tokens) + len(generated) == self.limits[slot]
        assert len(tokens) + len(generated) <= self.limits[slot]
        assert eos is None or eos not in generated[:-1]


def eager_step(buckets: tuple[int, ...] = (1, 2, 4), drafts: int | None = None, **options) -> DecodeStep:
    names = ("ngram", "sample", "eos_token_id")
    step_options = {name: options.pop(name) for name in names if name in options}
    return DecodeStep(tiny_model(**options), buckets=buckets, drafts=drafts, compile=False, **step_options)


def everything(step: DecodeStep) -> list[torch.Tensor]:
    """Copies of all that a step writes, but for what belongs to no sequence."""
    return [step.model.state.clone(), *(t[:-1].clone() for t in step.sequences.tensors())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


class Schedule:
    """A random engine: joins, finishes, padding, sequences left out for some steps, results read late."""

    def __init__(self, seed: int, slots: int = 5, count: int = 9) -> None:
        self.random = random.Random(seed)
        self.waiting = [
            (prompt(self.random.choice((1, 3, 15, 16, 17, 40, 60)), 100 * seed + i), self.random.randint(1, 30))
            for i in range(count)
        ]
        self.slots = slots

    def play(self, host: Host, largest: int, on_step: Callable[[StepResult], None] = lambda result: None) -> int:
        """Run it to the end; the number of sequences checked."""
        free, busy, late, checked = list(range(self.slots)), [], [], 0
        while self.waiting or busy:
            if self.waiting and free and self.random.random() < 0.4:
                tokens, new = self.waiting.pop()
                slot = free.pop(self.random.randrange(len(free)))
                while late:
                    host.take(late.pop(0))
                late.append(host.join(slot, tokens, len(tokens) + new, chunk=self.random.choice((7, 30, 64))))
                busy.append(slot)
            some = self.random.sample(busy, self.random.randint(0, min(len(busy), largest)))
            some += [-1] * self.random.randint(0, largest - len(some))
            self.random.shuffle(some)
            late.append(host.step.launch(some))
            on_step(late[-1])
            while len(late) > self.random.randint(0, 3):
                host.take(late.pop(0))
            if not late:
                for slot in [slot for slot in busy if host.finished[slot]]:
                    host.check(slot, host.step.eos_token_id)
                    checked += 1
                    busy.remove(slot)
                    free.append(slot)
        return checked
