"""DecodeStep: greedy tokens equal those of the model alone, whatever the host does; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from serving_runs import (
    VOCAB,
    Host,
    Schedule,
    eager_step,
    everything,
    one_thread,  # noqa: F401  a fixture
    prefill,
    prompt,
    same,
    tiny_model,
)

import swa_inductor as swa
from swa_inductor.serving import DecodeStep
from swa_inductor.serving._pinned import HostRing
from swa_inductor.serving.decode_step import _COUNTS

# ---------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafts": 0},
        {"drafts": 1, "ngram": 1},
        {"tokens_per_step": 1},
        {"tokens_per_step": 6, "ngram": 5},
        {"layers": 2, "sinks": False, "buckets": (4,)},
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_are_those_of_the_model_alone(options: dict, seed: int) -> None:
    """A9, D8, F2, F6: prompts longer than the window, rejected drafts, sequences left out; rings start as NaN codes."""
    step = eager_step(**options)
    host = Host(step)
    assert Schedule(seed).play(host, step.buckets[-1]) == 9
    assert step.error_count() == 0 and step.compiles == step.recordings == step.replays == 0
    assert set(step.launches) == set(step.buckets) and sum(step.launches.values()) > 20
    if step.drafts:
        assert 0 < host.accepted < host.drafts
    else:
        assert host.drafts == 0


def test_settled_lengths_are_counted_once() -> None:
    """F5, F6: the host gives slots alone, and position = base + accepted after each step, also of one left out."""
    host = Host(eager_step())
    s = host.step.sequences
    for slot in range(3):
        host.start(slot, prompt(20, slot), 90)
    for i in range(25):
        slots = [slot for slot in range(3) if (i + slot) % 3]
        host.run(slots)
        for slot in range(3):
            first = int(s.lengths[slot]) + int(s.accepted[slot])
            known = host.prompts[slot] + host.generated[slot]
            assert first == len(known) - 1 and s.tokens[slot, : first + 1].tolist() == known
    assert host.accepted > 0


def test_pending_tokens_outlive_padded_steps() -> None:
    """F7: padded batches one after the other take no place that a pending token has."""
    host = Host(eager_step())
    for slot in range(3):
        host.start(slot, prompt(20, slot), 60)
    before = everything(host.step)
    for _ in range(6):
        assert host.run([-1] * 4).tokens == [[]] * 4
    assert same(everything(host.step), before)
    host.finish([0, 1, 2])
    for slot in range(3):
        host.check(slot)


def test_unread_results_are_not_lost() -> None:
    """F10: more steps than there are host buffers, none read; then all are, out of order."""
    host = Host(eager_step(drafts=0))
    host.start(0, prompt(20), 60)
    results = [host.step.launch([0]) for _ in range(25)]
    assert all(result.ready() for result in results)
    read = [result.read() for result in reversed(results)][::-1]
    assert [len(step.tokens[0]) for step in read] == [1] * 25
    for result in results:
        host.take(result)
    host.check(0)


def test_host_buffers_wait_for_their_copies() -> None:
    """F10: the event of a buffer is awaited, and its results are read, before it is written again."""
    log: list[tuple[str, int]] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def record(self) -> None:
            log.append(("record", self.number))

        def synchronize(self) -> None:
            log.append(("wait", self.number))

    ring = HostRing(2, 3, 5, torch.device("cpu"))
    for number, buffer in enumerate(ring._buffers):
        buffer.event = Event(number)  # type: ignore[assignment]
    taken = []
    for step in range(3):
        buffer = ring.take(lambda step=step: log.append(("read", step)))
        taken.append(buffer)
        buffer.record()
    assert taken[0] is taken[2] is not taken[1]
    assert log == [
        ("wait", 0),
        ("record", 0),
        ("wait", 1),
        ("record", 1),
        ("read", 0),
        ("wait", 0),
        ("record", 0),
    ]


def test_an_own_sampler() -> None:
    """Accepting drafts while they equal the sampled tokens gives what sampling token by token gives."""

    def third(logits: torch.Tensor) -> torch.Tensor:
        return logits.topk(3).indices[..., 2]

    step = eager_step(sample=third)
    host = Host(step)
    host.start(1, prompt(40), 96)
    host.finish([1])
    known = host.prompts[1] + host.generated[1]
    want = third(step.model.reference_logits(known))[39:-1]
    assert host.generated[1] == want.tolist() and 0 < host.accepted < host.drafts
    wrong = eager_step(sample=lambda logits: logits.argmax(-1).int())
    with pytest.raises(swa.InvalidArgumentError, match="sample: got torch.int32"):
        wrong.launch([0])


# ---------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("new", range(1, 9))
def test_limits_are_exact(new: int) -> None:
    """Prompts that repeat themselves: many drafts are right, also those that would go past the limit."""
    step = eager_step(vocab_size=4, ngram=2)
    host = Host(step)
    host.start(2, [0, 1] * 20, 40 + new)
    host.finish([2])
    host.check(2)
    assert len(host.generated[2]) == new
    before = everything(step)
    assert host.run([2]) == ([[]], [True], [0], [0], [False])
    assert same(everything(step), before)


def test_a_sequence_may_fill_its_ring_and_history() -> None:
    step = eager_step(window=95, max_length=96)
    host = Host(step)
    for slot in range(4):
        host.start(slot, prompt(80 + slot, slot), 96)
    host.finish([0, 1, 2, 3])
    for slot in range(4):
        host.check(slot)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_follows_eos(seed: int) -> None:
    """The end token may come from prefill, as a draft or as the sampled token behind the drafts."""
    free = Host(eager_step())
    for slot in range(4):
        free.start(slot, prompt(17 + slot, slot + 10 * seed), 90)
    free.finish([0, 1, 2, 3])
    eos = free.generated[seed][0 if seed == 0 else -3]
    host = Host(eager_step(eos_token_id=eos))
    for slot in range(4):
        host.start(slot, free.prompts[slot], 90)
    host.finish([0, 1, 2, 3])
    for slot in range(4):
        host.check(slot, eos)
        assert host.generated[slot] == free.generated[slot][: len(host.generated[slot])]
    assert any(len(host.generated[slot]) < len(free.generated[slot]) for slot in range(4))
    assert host.finished[seed] and host.generated[seed][-1] == eos


# ---------------------------------------------------------------------------------------------------- bytes


def test_padding_and_finished_rows_write_no_byte() -> None:
    """D5, F9: a batch of 4 after which 2 are finished; then these and padding beside a live one: they stay."""
    step = eager_step(num_slots=6, buckets=(4,))
    host = Host(step)
    for slot, limit in enumerate((90, 30, 90, 28, 90)):
        host.start(slot, prompt(20, slot), limit)
    host.finish([1, 3])
    before = everything(step)
    host.run([1, 3, 0, -1])
    after = everything(step)
    changed = [
        {slot for slot in range(6) if not torch.equal(old[slot], new[slot])}
        for old, new in zip(before, after, strict=True)
    ]
    assert changed[0] == {0} and set().union(*changed) == {0}
    rows = (before[0][0] != after[0][0]).view(1, -1)[:, : step.model.spec.ring_bytes].view(step.model.spec.rows, -1)
    drafts = step._rows[4].results[2, -_COUNTS + 2]
    assert rows.any(1).sum() == 1 + drafts
    host.run([-1, -1, 3])
    assert same(everything(step), after)


@pytest.mark.parametrize("corrupt", ["accepted", "lengths", "valid_start"])
def test_bad_device_state_is_refused_and_counted(corrupt: str) -> None:
    """F14: no byte of that sequence changes, the others go on, and the host can see it."""
    step = eager_step()
    host = Host(step)
    for slot in range(3):
        host.start(slot, prompt(20, slot), 60)
    getattr(step.sequences, corrupt)[1] = {"accepted": 5, "lengths": -30, "valid_start": 50}[corrupt]
    before = step.model.state.clone()
    read = step.launch([0, 1, 2]).read()
    assert read.refused == [False, True, False] and read.tokens[1] == [] and read.tokens[0] and read.tokens[2]
    assert not read.finished[1] and torch.equal(step.model.state[1], before[1])
    assert step.error_count() == 1


def test_placeholders_are_inert() -> None:
    """F2: a count of -1 reads as no accepted token."""
    step = eager_step()
    host = Host(step)
    host.start(0, prompt(20), 40)
    step.sequences.accepted[0] = -1
    host.finish([0])
    host.check(0)
    assert step.error_count() == 0


def test_a_slot_is_used_again() -> None:
    """Nothing of its last owner is left, whose history and limits were longer; admission of several at once."""
    step = eager_step()
    host = Host(step)
    host.start(0, prompt(60), 96)
    host.finish([0])
    sequences = {0: prompt(5, 7), 3: prompt(18, 8)}
    logits = prefill(step.model, [(slot, tokens, len(tokens)) for slot, tokens in sequences.items()])
    result = step.admit([0, 3], list(sequences.values()), step.sample_first(logits), limits=[30, 19])
    assert result.bucket == 0 and result.slots == (0, 3)
    host.prompts.update(sequences)
    host.limits.update({0: 30, 3: 19})
    host.generated = {0: [], 3: []}
    assert host.take(result).finished == [False, True]
    host.finish([0, 3])
    for slot in sequences:
        host.check(slot)


def test_valid_start_is_honoured() -> None:
    """A12: a prefix of which the ring holds the last W tokens alone, computed again: the tokens of the whole prompt."""
    model = tiny_model(layers=1)
    tokens = prompt(40)
    start = 40 - model.spec.window + 1
    metadata = swa.PrefillMetadata.build(
        model.spec, num_slots=5, state_ids=[2], q_lens=[40 - start], k_lens=[40], valid_start=[start]
    )
    with torch.no_grad():
        logits = model.prefill(torch.tensor(tokens[start:]), metadata, torch.tensor([39 - start]))
    step = DecodeStep(model, buckets=[2], compile=False)
    host = Host(step)
    host.prompts[2], host.limits[2], host.generated[2] = tokens, 60, []
    host.take(step.admit([2], [tokens], step.sample_first(logits), limits=[60], valid_start=[start]))
    host.finish([2])
    host.check(2)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([5], r"slots\[0\]: got 5; allowed: -1 to 4"),
        ([0, -2], r"slots\[1\]: got -2"),
        ([1, 2, 1], "each slot once"),
        ([0, 1, 2, 3, 4], "got 5 sequences; allowed: 4, the largest bucket"),
    ],
)
def test_launches_that_are_refused(slots: list[int], message: str) -> None:
    """F14: what the host gives is checked on the host; nothing is launched."""
    step = eager_step()
    before = everything(step)
    with pytest.raises(swa.InvalidArgumentError, match=message):
        step.launch(slots)
    assert sum(step.launches.values()) == 0 and same(everything(step), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [5]}, r"slots\[0\]: got 5; allowed: 0 to 4"),
        ({"slots": [-1]}, r"slots\[0\]: got -1"),
        ({"slots": [0, 1]}, "prompts length: got 1; allowed: 2"),
        ({"prompts": [[]]}, r"prompts\[0\] length: got 0"),
        ({"prompts": [[0] * 96]}, r"prompts\[0\] length: got 96; allowed: 1 to max_length - 1 = 95"),
        ({"prompts": [[0, VOCAB, -1]]}, rf"prompts\[0\]: got \[{VOCAB}, -1\]; allowed: tokens 0 to {VOCAB - 1}"),
        ({"limits": [3]}, r"limits\[0\]: got 3; allowed: 4 to max_length=96"),
        ({"limits": [97]}, r"limits\[0\]: got 97"),
        ({"valid_start": [4]}, r"valid_start\[0\]: got 4; allowed: 0 to 3"),
        ({"first": torch.zeros(1, dtype=torch.int32)}, r"first: got torch.int32 \(1,\)"),
        ({"first": torch.zeros(2, dtype=torch.int64)}, r"first: got torch.int64 \(2,\)"),
    ],
)
def test_admissions_that_are_refused(change: dict, message: str) -> None:
    step = eager_step()
    before = everything(step)
    arguments = {"slots": [0], "prompts": [[1, 2, 3]], "first": torch.zeros(1, dtype=torch.int64), "limits": [20]}
    with pytest.raises(swa.InvalidArgumentError, match=message):
        step.admit(**{**arguments, **change})
    assert same(everything(step), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets": []}, "buckets"),
        ({"buckets": [0, 2]}, "buckets"),
        ({"drafts": 4}, "drafts: got 4; allowed: 0 to D - 1 = 3"),
        ({"ngram": 0}, "ngram"),
        ({"eos_token_id": VOCAB}, "eos_token_id"),
        ({"graphs": True}, "graphs: got True"),
    ],
)
def test_steps_that_are_refused(change: dict, message: str) -> None:
    with pytest.raises(swa.InvalidArgumentError, match=message):
        DecodeStep(tiny_model(), **{"buckets": [2], "compile": False, **change})


def test_empty_batches() -> None:
    """F12: nothing is launched for nobody, and nothing breaks."""
    step = eager_step()
    before = everything(step)
    assert step.launch([]).read() == ([], [], [], [], [])
    assert step.admit([], [], torch.zeros(0, dtype=torch.int64), limits=[]).read() == ([], [], [], [], [])
    assert same(everything(step), before)
