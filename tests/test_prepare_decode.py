"""swa_inductor::prepare_decode, new tensors and `out`, and its host twin: eager, C++ and generated sm_90 code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from cases import BY_NAME, flat, prepare_op, store_op, unflat, vectors
from numerics import assert_same
from runs import HOW, Runs, ints

import swa_inductor as swa
from swa_inductor.testing import generate_code, run_on_cpu

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
SLOTS = 5
FORMS = ("new", "out")
Batch = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Per sequence: lengths, accepted, state_ids, valid_start, draft_counts."""

every_how = pytest.mark.parametrize("how", HOW)
every_form = pytest.mark.parametrize("form", FORMS)


def tensors(batch: Batch) -> list[torch.Tensor]:
    lengths, *rest = batch
    return [torch.tensor(lengths, dtype=torch.int64), *(ints(*values) for values in rest)]


@cache
def runs(spec: swa.RingSpec, width: int | None, form: str) -> Runs:
    example = tensors(([0] * 7,) * 5)
    buffers = flat(swa.PreparedDecode.allocate(spec, 7, width=width)) if form == "out" else ()
    return Runs(prepare_op(spec, SLOTS, width), *example, *buffers)


def prepare(how: str, form: str, spec: swa.RingSpec, batch: Batch, width: int | None = None) -> swa.PreparedDecode:
    """The op on one batch; `out` into buffers full of junk. It writes to nothing else."""
    args = tensors(batch)
    before = [a.clone() for a in args]
    if form == "new":
        out = runs(spec, width, form)(how, *args)
    else:
        out = flat(swa.PreparedDecode.allocate(spec, len(args[0]), width=width))
        for t in out[:-1]:
            t.fill_(77)
        runs(spec, width, form)(how, *args, *out)
    for a, was in zip(args, before, strict=True):
        assert_same(a, was)
    return unflat(*out)


def twin(spec: swa.RingSpec, batch: Batch, width: int | None = None) -> swa.PreparedDecode:
    """The rule in Python, and the host builder."""
    ids, at, starts, lengths, errors = [], [], [], [], 0
    for length, accepted, slot, start, drafts in zip(*batch, strict=True):
        first, d = length + max(accepted, 0), spec.tokens_per_step
        bad = not (-1 <= slot < SLOTS and length >= 0 and accepted <= d and drafts < d and start <= first)
        bad = bad and slot != -1
        live = slot >= 0 and not bad
        for j in range(d):
            ids.append(slot if live and j <= max(drafts, 0) else -1)
            at.append(first + j)
            starts.append(start)
        lengths.append(first if live else length)
        errors += bad
    metadata = swa.DecodeMetadata.build(
        spec, num_slots=SLOTS, state_ids=ids, positions=at, valid_start=starts, width=width
    )
    return swa.PreparedDecode(metadata, torch.tensor(lengths, dtype=torch.int64), ints(errors))


def check(how: str, form: str, spec: swa.RingSpec, batch: Batch, width: int | None = None) -> swa.PreparedDecode:
    got = prepare(how, form, spec, batch, width)
    for value, expected in zip(flat(got), flat(twin(spec, batch, width)), strict=True):
        assert_same(value, expected)
    return got


def step(lengths: Sequence[int], accepted: Sequence[int], ids: Sequence[int], drafts: int = 5) -> Batch:
    return lengths, accepted, ids, [0] * len(ids), [drafts] * len(ids)


@every_how
@every_form
def test_example(how: str, form: str) -> None:
    """F6: base lengths 1000, 45, 294 and 6, 1, 3 accepted of 6: 1006, 46, 297, and the same again when run again."""
    batch = step([1000, 45, 294], [6, 1, 3], [0, 4, 2])
    got = check(how, form, V4, batch, 128)
    assert got.lengths.tolist() == [1006, 46, 297] and got.errors.item() == 0
    assert got.metadata.positions.tolist() == [p + j for p in (1006, 46, 297) for j in range(6)]
    assert got.metadata.store_rows[::6].tolist() == [1006 % 134, 4 * 134 + 46, 2 * 134 + 297 % 134]
    for value, again in zip(flat(got), flat(prepare(how, form, V4, batch, 128)), strict=True):
        assert_same(value, again)


TABLE = [  # slot, p, n, first row, last row
    (0, 0, 1, 0, 0),
    (0, 127, 128, 0, 127),
    (0, 128, 128, 1, 128),
    (0, 133, 128, 6, 133),
    (0, 134, 128, 7, 0),
    (0, 261, 128, 0, 127),
    (2, 134, 128, 275, 268),
    (3, 1000, 128, 471, 464),
    (3, 50, 51, 402, 452),
]


@every_how
@every_form
def test_table(how: str, form: str) -> None:
    batch = step([p - p % 7 for _, p, *_ in TABLE], [p % 7 for _, p, *_ in TABLE], [slot for slot, *_ in TABLE])
    got = check(how, form, V4, batch, 128).metadata
    for (slot, p, n, first, last), t in zip(TABLE, range(0, 6 * len(TABLE), 6), strict=True):
        row = got.index[t].tolist()
        assert (int(got.state_ids[t]), int(got.positions[t])) == (slot, p)
        assert got.offset_len[t].tolist() == [first, n] and int(got.store_rows[t]) == last
        assert (row[0], row[n - 1], row[n:]) == (first, last, [-1] * (128 - n))


def random_batch(d: int, firsts: Sequence[int], seed: int) -> Batch:
    """Steps whose first position is each of `firsts`, whatever was accepted of the last; all else at random."""
    rng = random.Random(seed)
    accepted = [rng.randint(-1, min(d, p)) for p in firsts]
    return (
        [p - max(a, 0) for p, a in zip(firsts, accepted, strict=True)],
        accepted,
        [rng.randint(-1, SLOTS - 1) for _ in firsts],
        [rng.choice([0, -7, rng.randint(0, p), p]) for p in firsts],
        [rng.choice([d - 1, rng.randint(-2, d - 1)]) for _ in firsts],
    )


@pytest.mark.parametrize("d", range(1, 9))
@every_how
def test_every_step_size(how: str, d: int) -> None:
    """A10: equal to the host builder for D = 1..8, first positions 0..400, whatever was accepted and is drafted."""
    spec = swa.RingSpec(128, d, 64, ring_rows=127 + d if d % 3 == 0 else None)
    if how == "eager":
        for seed in range(3):
            for form in FORMS:
                check(how, form, spec, random_batch(d, range(401), seed), (None, 128, 200)[seed])
    else:  # a compile takes seconds
        torch._dynamo.reset()  # a function may compile 8 times
        check(how, FORMS[d // 2 % 2], spec, random_batch(d, range(401), d), 128 if d % 2 else None)


@pytest.mark.parametrize("spec", [swa.RingSpec(1, 1, 32), swa.RingSpec(7, 4, 32, ring_rows=31)], ids=["1", "7"])
def test_random_batches(spec: swa.RingSpec) -> None:
    """Small rings and long sequences."""
    rng = random.Random(spec.window)
    for seed in range(20):
        firsts = [rng.choice([rng.randrange(40), rng.randrange(10**6), 2**31 + 5, 2**40]) for _ in range(30)]
        lengths, accepted, ids, start, drafts = random_batch(spec.tokens_per_step, firsts, seed)
        start = [min(s, 2**31 - 1) for s in start]
        check("eager", FORMS[seed % 2], spec, (lengths, accepted, ids, start, drafts), spec.window + seed)


@every_how
def test_long_sequences_and_wide_windows(how: str) -> None:
    """Positions beyond 2^31, more than one block of columns, and more sequences than one block of the counter."""
    spec = swa.RingSpec(300, 2, 32)
    firsts = [2**31 - 2, 2**31, 2**40 + 1, 299, 300, 301] * 100
    lengths, accepted, ids, _, drafts = random_batch(2, firsts, 3)
    ids[599], ids[0] = SLOTS, -2
    got = check(how, "new", spec, (lengths, accepted, ids, [0] * 600, drafts), 310)
    assert got.errors.item() == 2


@every_how
@every_form
def test_placeholders_are_inert(how: str, form: str) -> None:
    """F2: counts of -1 left from a skipped step are no drafts, and negative accepted counts are none accepted."""
    got = check(how, form, V4, ([40, 40, 40], [-1, -(2**31), 2], [0, 1, 2], [0] * 3, [-1, -(2**31), -3]))
    assert got.lengths.tolist() == [40, 40, 42] and got.errors.item() == 0
    assert got.metadata.state_ids.view(3, 6).tolist() == [[slot] + [-1] * 5 for slot in range(3)]
    assert got.metadata.positions[::6].tolist() == [40, 40, 42]


BAD = {  # length, accepted, slot, valid_start, draft_count
    "slot": (40, 1, SLOTS, 0, 5),
    "far slot": (40, 1, 2**31 - 1, 0, 5),
    "slot below -1": (40, 1, -2, 0, 5),
    "negative length": (-1, 6, 1, 0, 5),
    "most negative length": (-(2**63), 6, 1, 0, 5),
    "accepted": (40, 7, 1, 0, 5),
    "most accepted": (2**31, 2**31 - 1, 1, 0, 5),
    "draft_counts": (40, 1, 1, 0, 6),
    "valid_start": (40, 1, 1, 42, 5),
}


@every_how
@every_form
def test_bad_device_metadata(how: str, form: str) -> None:
    """F14: never raised but counted; every row of it is padded and its length kept; its neighbours keep theirs."""
    for bad in BAD.values():
        around = (40, 1, 3, 41, 5), (300, 6, 2, 0, 2)
        got = check(how, form, V4, tuple(zip(around[0], bad, around[1], strict=True)), 128)
        assert got.errors.item() == 1 and got.lengths.tolist() == [41, bad[0], 306]
        own = [t[6:12] for t in flat(got)[:6]]
        for t, padded in zip(own, (-1, 0, 0, -1, None, -1), strict=True):
            assert padded is None or (t == padded).all()
        assert own[4].tolist() == [[-1, 0]] * 6


@every_how
def test_a_length_at_the_end_of_int64(how: str) -> None:
    """F14: what would overflow is bad."""
    got = prepare(how, "new", V4, step([2**63 - 1, 2**63 - 6, 2**62], [6, 0, 6], [0, 1, 2]))
    assert got.errors.item() == 2 and got.lengths.tolist() == [2**63 - 1, 2**63 - 6, 2**62 + 6]
    assert got.metadata.state_ids.tolist() == [-1] * 12 + [2] * 6


@every_how
def test_what_a_padded_sequence_holds_is_ignored(how: str) -> None:
    """F9: a finished sequence is one with slot -1: no row of its step is live, and nothing of it is an error."""
    got = check(how, "new", V4, ([-5, 7, 7], [9, 1, 1], [-1, 0, -1], [10**6, 0, 0], [77, 5, 5]))
    assert got.errors.item() == 0 and got.lengths.tolist() == [-5, 8, 7]
    assert got.metadata.state_ids.tolist() == [-1] * 6 + [0] * 6 + [-1] * 6


@every_how
def test_errors_add_up_in_the_buffer(how: str) -> None:
    """F14: the counter that the host reads later; a call without bad sequences leaves it."""
    out = flat(swa.PreparedDecode.allocate(V4, 9, width=None))
    for bad, total in ((3, 3), (0, 3), (9, 12)):
        args = tensors(step([40] * 9, [1] * 9, [SLOTS] * bad + [0] * (9 - bad)))
        runs(V4, None, "out")(how, *args, *out)
        assert out[-1].tolist() == [total]


@every_how
@every_form
def test_a_store_writes_nothing_for_padded_and_bad_rows(how: str, form: str) -> None:
    """D5, F9, F14: 5 live sequences, then 2 in the same buffers: the rings of the others keep every byte."""
    case = BY_NAME["v4"]
    cache = torch.full(V4.cache_shape(SLOTS), 0xA5, dtype=torch.uint8)
    k, _, _ = vectors(case, 30)
    out = flat(swa.PreparedDecode.allocate(V4, 5))
    first = step([10, 20, 30, 40, 133], [0] * 5, range(5))
    second = ([10, 20, 30, 40, 133], [6] * 4 + [7], [0, -1, SLOTS, 3, 4], [0] * 5, [5, 5, 5, 1, 5])
    written = set()
    for batch in (first, second):
        if form == "out":
            runs(V4, None, form)(how, *tensors(batch), *out)
            m = unflat(*out).metadata
        else:
            m = prepare(how, form, V4, batch).metadata
        store_op(case)(k, None, cache, m.state_ids, m.positions)
        written |= {int(row) for row in m.store_rows if row >= 0}
        if batch is first:
            before = cache.clone()
    changed = (cache != before).flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
    assert changed == [16 + j for j in range(6)] + [3 * 134 + 46 + j for j in range(2)]
    untouched = (cache == 0xA5).flatten(0, 1).flatten(1).all(-1).nonzero().flatten().tolist()
    assert set(range(SLOTS * 134)) - set(untouched) == written  # store_rows names the rows that a store writes


@every_how
def test_buffers_keep_their_address(how: str) -> None:
    """D2: five calls, other sequences each; contents as from the host, data_ptr unchanged."""
    out = flat(swa.PreparedDecode.allocate(V4, 4, width=128))
    pointers = [t.data_ptr() for t in out]
    for seed in range(5):
        batch = random_batch(6, [random.Random(seed).randrange(2000) for _ in range(4)], seed)
        runs(V4, 128, "out")(how, *tensors(batch), *out)
        for value, expected in zip(out, flat(twin(V4, batch, 128)), strict=True):
            assert_same(value, expected)
        assert [t.data_ptr() for t in out] == pointers


def test_out_is_what_comes_back() -> None:
    out = swa.PreparedDecode.allocate(V4, 1)
    args = tensors(step([5], [1], [0]))[:3]
    assert swa.prepare_decode(*args, spec=V4, num_slots=SLOTS, out=out) is out
    assert out.lengths.tolist() == [6]


def test_defaults() -> None:
    """No valid_start is 0, no draft_counts is D - 1, no width is no index."""
    batch = step([1000, 45], [6, 1], [0, 4])
    args = tensors(batch)[:3]
    got = swa.prepare_decode(*args, spec=V4, num_slots=SLOTS)
    assert got.metadata.index is None
    for value, expected in zip(flat(got), flat(twin(V4, batch)), strict=True):
        assert_same(value, expected)
    code = generate_code(prepare_op(V4, SLOTS), *args, None, None)
    for value, expected in zip(run_on_cpu(code, [*args, None, None]), flat(got), strict=True):
        assert_same(value, expected)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("width", [None, 128])
def test_no_sequence_and_one(count: int, width: int | None) -> None:
    """F12: B = 0 writes 0 errors, or leaves the counter, in every form; B = 1 is a size of its own to torch."""
    batch = tuple(values[:count] for values in ([50], [3], [2], [0], [1]))
    want = flat(twin(V4, batch, width))
    fn = prepare_op(V4, SLOTS, width)
    args = tensors(batch)
    code = generate_code(fn, *args)
    torch._dynamo.reset()
    results = {"eager": fn(*args), "cpp": torch.compile(fn, fullgraph=True)(*args), "sm_90": run_on_cpu(code, args)}
    for result in results.values():
        for value, expected in zip(result, want, strict=True):
            assert_same(value, expected)
    out = flat(swa.PreparedDecode.allocate(V4, count, width=width))
    code = generate_code(fn, *args, *out)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True)
    for call in (fn, compiled, lambda *a: run_on_cpu(code, a)):
        out[-1].fill_(4)
        call(*args, *out)
        for value, expected in zip(out[:-1], want[:-1], strict=True):
            assert_same(value, expected)
        assert out[-1].tolist() == [4]
