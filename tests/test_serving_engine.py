"""The engine: tokens of every request as alone, whatever is batched with what; slots; order of launches and reads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from serving_runs import VOCAB, tiny_model
from torch._dynamo.utils import counters

import swa_inductor as swa
from swa_inductor.serving import DecodeStep, SmallModel, engine
from swa_inductor.serving.engine import Engine, Request

BUCKETS = (1, 2, 4)


def small_model(drafts: int = 0, num_slots: int = 3) -> SmallModel:
    return tiny_model(num_slots=num_slots, tokens_per_step=drafts + 1)


def some_requests(count: int = 14, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 60 tokens, shorter and longer than the window; 1 to 30 tokens to generate."""
    source = random.Random(seed)
    lengths = [(1, 1), (60, 1), (1, 30), (16, 17)] + [
        (source.randint(1, 60), source.randint(1, 30)) for _ in range(count)
    ]
    return [Request(i, source.choices(range(VOCAB), k=n), new) for i, (n, new) in enumerate(lengths[:count])]


def alone(model: SmallModel, request: Request) -> list[int]:
    """Greedy tokens of a request, token by token, without rings."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(int(model.reference_logits(tokens)[-1].argmax()))
    return tokens[len(request.prompt) :]


def serve(requests: Sequence[Request], drafts: int = 0, step: Any = None, **options: Any) -> Engine:
    """Run an engine over an eager step, or over `step`."""
    step = step or DecodeStep(small_model(drafts), buckets=BUCKETS, compile=False)
    made = Engine(step.model, step, **{"chunk_tokens": 13, **options})
    made.run(requests)
    return made


class LateResult:
    """Result of a launch that a LateStep has not run yet."""

    def __init__(self, owner: LateStep, slots: Sequence[int], bucket: int) -> None:
        self.owner, self.slots, self.bucket = owner, tuple(slots), bucket

    def read(self) -> Any:
        self.owner.events.append("read")
        return self.owner.run_up_to(self).read()


class LateStep:
    """A DecodeStep on a device as late as can be: a launch runs when its result is read, or that of a later one.

    Prefill and admission run at once, as if on a stream of their own.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step, self.model, self.buckets = step, step.model, step.buckets
        self.queue: deque[LateResult] = deque()
        self.events: list[str] = []
        self.sample_first, self.admit, self.error_count = step.sample_first, step.admit, step.error_count

    def launch(self, slots: Sequence[int]) -> LateResult:
        self.events.append("launch")
        self.queue.append(LateResult(self, slots, next(size for size in self.buckets if size >= len(slots))))
        return self.queue[-1]

    def run_up_to(self, result: LateResult) -> Any:
        while True:
            first = self.queue.popleft()
            ran = self.step.launch(first.slots)
            if first is result:
                return ran


def late_step(drafts: int = 0, num_slots: int = 3) -> LateStep:
    return LateStep(DecodeStep(small_model(drafts, num_slots), buckets=BUCKETS, compile=False))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def wanted() -> dict[int, list[int]]:
    model = small_model()
    tokens = {r.id: alone(model, r) for r in some_requests()}
    assert len(set(map(tuple, tokens.values()))) > len(tokens) // 2, "the model tells prompts apart"
    return tokens


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("time_slice", [None, 1, 7])
@pytest.mark.parametrize("overlapped", [False, True])
def test_tokens_as_alone(drafts: int, time_slice: int | None, overlapped: bool, wanted: dict[int, list[int]]) -> None:
    """Exact token counts and the same tokens in both loops, with slots reused, with preemption and with drafts."""
    made = serve(some_requests(), drafts, overlapped=overlapped, time_slice=time_slice)
    assert made.finished == wanted
    assert not made.busy and made.step.error_count() == 0
    seen = made.statistics
    assert max(turn.live for turn in seen.iterations) == 3
    assert (seen.preemptions > 0) == (time_slice is not None)
    first_tokens = len(wanted) + seen.preemptions
    assert seen.decode_tokens + first_tokens == sum(map(len, wanted.values()))
    if drafts:
        assert 0 < seen.accepted_drafts <= seen.drafts and seen.decode_tokens > seen.sequence_steps
    else:
        assert seen.drafts == 0 and seen.decode_tokens == seen.sequence_steps


class Clients(RuleBasedStateMachine):
    """Requests that come at any time, to an engine of any kind; some of them it must refuse."""

    @initialize(
        drafts=st.sampled_from([0, 3]),
        late=st.booleans(),
        num_slots=st.integers(1, 4),
        chunk_tokens=st.integers(1, 40),
        overlapped=st.booleans(),
        time_slice=st.none() | st.integers(1, 9),
    )
    def begin(self, drafts: int, late: bool, num_slots: int, **options: Any) -> None:
        step = late_step(drafts, num_slots)
        self.engine = Engine(step.model, step if late else step.step, **options)
        self.requests: list[Request] = []

    @rule(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), new=st.integers(1, 30))
    def submit(self, prompt: list[int], new: int) -> None:
        self.requests.append(Request(len(self.requests), prompt, new))
        self.engine.submit(self.requests[-1])

    @rule(prompt=st.sampled_from([[], [VOCAB], [-1], [0] * 96]), new=st.integers(0, 1))
    def submit_nonsense(self, prompt: list[int], new: int) -> None:
        with pytest.raises(swa.InvalidArgumentError):
            self.engine.submit(Request(len(self.requests), prompt, new))

    @rule(turns=st.integers(1, 12))
    def iterate(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.iterate()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.engine.iterate()
        assert self.engine.step.error_count() == 0
        assert len(self.engine.finished) == len(self.requests)
        for request in self.requests:
            prompt, made = list(request.prompt), self.engine.finished[request.id]
            logits = self.engine.model.reference_logits(prompt + made)
            assert made == logits.argmax(-1)[len(prompt) - 1 : -1].tolist() and len(made) == request.max_new_tokens


def test_any_schedule() -> None:
    """F1, F2, F4, F9, A11: each request gets the tokens that it would get alone."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    options = settings(max_examples=settings().max_examples // 4, stateful_step_count=16, suppress_health_check=checks)
    run_state_machine_as_test(Clients, settings=options)


@pytest.mark.parametrize("chunk_tokens", [1, 16, 200])
def test_any_chunks_of_a_prompt(chunk_tokens: int, wanted: dict[int, list[int]]) -> None:
    made = serve(some_requests(), chunk_tokens=chunk_tokens)
    assert made.finished == wanted
    seen = [turn.prefill_tokens for turn in made.statistics.iterations]
    assert sum(seen) == sum(len(r.prompt) for r in some_requests()) and max(seen) <= chunk_tokens


def test_a_compiled_prefill_is_compiled_once(wanted: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: one shape, whatever is in the chunk; compiled before the first request."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    step = DecodeStep(small_model(), buckets=BUCKETS, compile=False)
    made = Engine(step.model, step, chunk_tokens=32, compile_prefill=True)
    torch._dynamo.reset()
    counters.clear()
    made.warm_up()
    assert counters["stats"]["unique_graphs"] == 1
    assert made.run(some_requests()) == wanted
    assert counters["stats"]["unique_graphs"] == 1
    assert len({turn.prefill_tokens for turn in made.statistics.iterations}) > 3


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("deferred", [True, False])
def test_no_slot_has_a_new_owner_before_its_last_step_is_over(
    drafts: int, deferred: bool, wanted: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1, F4: steps run late, beside the prefills of later turns; a finished sequence is still part of one.

    Without the wait for that step it finds the state of the next owner in its slot, and runs the step on it.
    """

    def free_at_once(self: swa.SlotAllocator, slot: swa.Slot) -> None:
        self._live.remove(slot.id)
        self._free.append(slot.id)

    if not deferred:
        monkeypatch.setattr(swa.SlotAllocator, "free", free_at_once)
    step = late_step(drafts)
    made = serve(some_requests(), step=step, time_slice=5, chunk_tokens=200)
    assert (made.finished == wanted) == deferred
    assert not step.queue


def test_a_freed_slot_is_reused_one_step_later(wanted: dict[int, list[int]]) -> None:
    """F4: two slots, both taken: the third request gets the first slot that is free once the step in flight is over."""
    requests = [Request(0, [3, 1, 2], 2), Request(1, [5], 9), Request(2, [7], 2)]
    step = late_step(num_slots=2)
    made = Engine(step.model, step, chunk_tokens=8)
    for request in requests:
        made.submit(request)
    ended = started = None
    for turn in range(20):
        made.iterate()
        if 0 in made.finished and ended is None:
            ended = turn
        if not made._waiting and started is None:
            started = turn
    # Its last step was read in turn `ended`, with the step that holds its padded row in flight, read a turn later.
    assert ended is not None and started == ended + 2
    assert made.finished == {r.id: alone(step.model, r) for r in requests}


def test_a_finished_sequence_writes_no_byte() -> None:
    """F9: the row of a finished sequence in a step that runs after its end is read."""
    step = late_step(drafts=3, num_slots=2)
    made = Engine(step.model, step, chunk_tokens=8)
    made.submit(Request(0, [3, 1, 2], 4))
    made.submit(Request(1, [5, 9], 40))
    while 0 not in made.finished:
        made.iterate()
    assert step.queue and 0 in step.queue[0].slots  # a step with its row is still to run
    before = step.model.state[0].clone()
    while made.busy:
        made.iterate()
    assert torch.equal(step.model.state[0], before)


def test_pending_tokens_of_padded_prefills() -> None:
    """F7: four prefill calls with padding, before any of the steps behind them has run: no pending token is lost."""
    step = late_step(num_slots=4)
    made = Engine(step.model, step, chunk_tokens=8)
    requests = [Request(i, [i + 1, 2, i], 6) for i in range(4)]
    for request in requests:
        made.submit(request)
        made.iterate()
    assert [turn.prefill_tokens for turn in made.statistics.iterations] == [3] * 4
    while made.busy:
        made.iterate()
    assert made.finished == {r.id: alone(step.model, r) for r in requests}


@pytest.mark.parametrize("overlapped", [False, True])
def test_reads_lag_one_step(overlapped: bool) -> None:
    """Overlapped: step n + 1 is launched before step n is read, and no other read comes between two launches."""
    step = late_step()
    serve([Request(0, [1, 2, 3], 6)], step=step, overlapped=overlapped)
    if overlapped:  # five steps, then one with the padded row of the finished sequence
        assert step.events == ["launch"] + ["launch", "read"] * 5 + ["read"]
    else:
        assert step.events == ["launch", "read"] * 5


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_end_of_sequence(drafts: int, overlapped: bool, wanted: dict[int, list[int]]) -> None:
    """A request ends behind its first EOS token, be it the first token at all."""
    generated = [t for tokens in wanted.values() for t in tokens[:1]]
    eos = max(set(generated), key=generated.count)
    cut = {i: tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for i, tokens in wanted.items()}
    assert {len(tokens) for tokens in cut.values()} > {1} and cut != wanted
    step = DecodeStep(small_model(drafts), buckets=BUCKETS, compile=False, eos_token_id=eos)
    assert serve(some_requests(), step=step, overlapped=overlapped, time_slice=6).finished == cut


def test_what_a_turn_saw() -> None:
    """Rows and padding make a bucket; every sequence alive is counted once, with the tokens it has."""
    made = serve(some_requests())
    turns = made.statistics.iterations
    assert {t.rows + t.padded for t in turns} <= {0, *BUCKETS}
    assert {t.rows for t in turns} == {0, 1, 2, 3} or {t.rows for t in turns} == {1, 2, 3}
    assert max(t.waiting for t in turns) == len(some_requests()) - 3 and turns[-1].waiting == 0
    assert 0 < max(t.alive_tokens for t in turns) <= 3 * 90
    assert len(made.statistics.launch_s) == sum(t.rows > 0 for t in turns)
    pure = sum(t.rows > 0 and not t.prefill_tokens for t in turns)
    assert 0 < len(made.statistics.gap_s) <= pure


def test_arrivals(monkeypatch: pytest.MonkeyPatch, wanted: dict[int, list[int]]) -> None:
    """On a clock that advances by sleeping and 1 ms per look: requests 100 s apart never meet; all at once they do."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 0.001
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(engine.time, "perf_counter", look)
    monkeypatch.setattr(engine.time, "sleep", sleep)
    spread = [Request(r.id, r.prompt, r.max_new_tokens, 100.0 * r.id) for r in some_requests()][::-1]
    step = DecodeStep(small_model(), buckets=BUCKETS, compile=False)
    made = Engine(step.model, step)
    assert made.run(spread, speed=2) == wanted
    assert max(turn.live for turn in made.statistics.iterations) == 1
    assert now > 50 * max(r.id for r in spread)
    assert max(made.statistics.gap_s) < 1, "sleep is no gap between steps"
    assert max(turn.live for turn in serve(spread).statistics.iterations) == 3


def test_bad_state_on_the_device_is_not_ignored() -> None:
    step = DecodeStep(small_model(), buckets=BUCKETS, compile=False)
    made = Engine(step.model, step)
    made.submit(Request(5, [1, 2], 20))
    made.iterate()
    step.sequences.lengths[0] = -9
    with pytest.raises(RuntimeError, match="request 5: its state on the device is not valid"):
        for _ in range(3):
            made.iterate()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, [1], 1), "request id: got 0"),
        (Request(1, [], 1), "request 1 prompt: got no token"),
        (Request(1, [3, 24], 1), "request 1 prompt: got tokens 3 to 24; allowed: 0 to 23"),
        (Request(1, [-1], 1), "request 1 prompt: got tokens -1 to -1"),
        (Request(1, [1], 0), "request 1 max_new_tokens: got 0"),
        (Request(1, [1] * 90, 7), "request 1 tokens: got 97; allowed: up to max_length=96"),
    ],
)
def test_bad_requests(request_: Request, message: str) -> None:
    """Refused before anything runs, also where good ones come with it."""
    step = DecodeStep(small_model(), buckets=BUCKETS, compile=False)
    made = Engine(step.model, step)
    with pytest.raises(swa.InvalidArgumentError, match=message):
        made.run([Request(0, [1], 1), request_])
    assert not made.busy and not made.statistics.iterations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens: got 0"),
        ({"time_slice": 0}, "time_slice: got 0"),
        ({}, "num_slots: got 5; allowed: up to 4, the largest bucket"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    step = DecodeStep(small_model(num_slots=3 if options else 5), buckets=BUCKETS, compile=False)
    with pytest.raises(swa.InvalidArgumentError, match=message):
        Engine(step.model, step, **options)


def test_bad_step_and_speed() -> None:
    step = DecodeStep(small_model(), buckets=BUCKETS, compile=False)
    with pytest.raises(swa.InvalidArgumentError, match="step: got a step of another model"):
        Engine(small_model(), step)
    with pytest.raises(swa.InvalidArgumentError, match="speed: got 0"):
        Engine(step.model, step).run([], speed=0)
