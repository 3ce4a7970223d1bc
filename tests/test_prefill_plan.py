"""swa_inductor::prefill_plan and its host twin: load plan and pivots, in eager mode, C++ and generated sm_90 code."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from numerics import assert_same
from runs import HOW, Runs, ints
from torch.testing import FileCheck

import swa_inductor as swa

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
SMALL = swa.RingSpec(7, 4, 32, ring_rows=13)
SLOTS = 5
UNUSED = [-1, 0, 0, 0]

every_how = pytest.mark.parametrize("how", HOW)


@cache
def runs(spec: swa.RingSpec) -> Runs:
    def fn(*args: torch.Tensor):  # noqa: ANN202
        *lists, start, tokens = args
        plan = swa.prefill_plan(*lists, spec=spec, num_slots=SLOTS, num_tokens=len(tokens), valid_start=start)
        return *plan, tokens + 1  # sizes of the arguments that a graph reads are what it takes from the caller

    return Runs(fn, *(ints(*range(5)) for _ in range(4)), torch.zeros(11))


def plan(
    how: str, spec: swa.RingSpec, ids: list, q: list, k: list, start: list | None = None, tokens: int | None = None
) -> tuple[torch.Tensor, ...]:
    start = [0] * len(ids) if start is None else start
    tokens = sum(q) if tokens is None else tokens
    return runs(spec)(how, ints(*ids), ints(*q), ints(*k), ints(*start), torch.zeros(tokens))[:-1]


def check(how: str, spec: swa.RingSpec, ids: list, q: list, k: list, start: list | None = None, pad: int = 0) -> tuple:
    """Runs device op and host twin, compares them to the bit, returns segments and pivots as lists."""
    got = plan(how, spec, ids, q, k, start, sum(q) + pad)
    m = swa.PrefillMetadata.build(
        spec, num_slots=SLOTS, state_ids=ids, q_lens=q, k_lens=k, valid_start=start, num_tokens=sum(q) + pad
    )
    host = (m.segments, m.pivots, m.state_ids, m.positions, m.q_starts, m.valid_start)
    for value, expected in zip(got, host, strict=True):
        assert_same(value, expected)
    return got[0].tolist(), got[1].tolist()


LOAD = [  # q_start, valid_start, segments (src, src_row, rows) with "s" for the slot
    (0, 0, [(-1, 0, 128)]),
    (1, 0, [(-1, 0, 127), ("s", 0, 1)]),
    (127, 0, [(-1, 0, 1), ("s", 0, 127)]),
    (128, 0, [("s", 0, 128)]),
    (134, 0, [("s", 6, 128)]),
    (135, 0, [("s", 7, 127), ("s", 0, 1)]),
    (2048, 0, [("s", 44, 90), ("s", 0, 38)]),
    (300, 200, [(-1, 0, 28), ("s", 66, 68), ("s", 0, 32)]),
    (2048, 2048, [(-1, 0, 128)]),  # A11: nothing of a ring that was never written
]


@every_how
def test_load_plan(how: str) -> None:
    """The rows of a sequence sum up to W and follow one another in section 1, which counts from its start."""
    n = len(LOAD)
    ids, q = [i % SLOTS for i in range(n)], [i % 3 for i in range(n)]
    k, start = [r[0] + q[i] for i, r in enumerate(LOAD)], [r[1] for r in LOAD]
    segments, _ = check(how, V4, ids, q, k, start)
    for i, (_, _, wanted) in enumerate(LOAD):
        used = [s for s in segments[i] if s != UNUSED]
        assert [(src, row, rows) for src, row, _, rows in used] == [
            (ids[i] if src == "s" else src, row, rows) for src, row, rows in wanted
        ]
        assert [dst for _, _, dst, _ in used] == [i * 128 + sum(s[3] for s in used[:j]) for j in range(len(used))]
        assert sum(s[3] for s in used) == 128


def test_without_a_start_sequences_start_at_zero() -> None:
    lists = ints(3, 1), ints(10, 2), ints(10, 300)
    how = {"spec": V4, "num_slots": SLOTS, "num_tokens": 12}
    zeros = swa.prefill_plan(*lists, **how, valid_start=ints(0, 0))
    for value, expected in zip(swa.prefill_plan(*lists, **how), zeros, strict=True):
        assert_same(value, expected)


PIVOTS = [  # q_start, valid_start, j, pivots of one sequence, whose section 2 starts at row 128
    (2048, 0, 0, [1, 127, 128, 1]),
    (2048, 0, 126, [127, 1, 128, 127]),
    (2048, 0, 127, [128, 0, 128, 128]),
    (2048, 0, 200, [128, 0, 201, 128]),
    (50, 0, 0, [78, 50, 128, 1]),
    (300, 200, 0, [28, 100, 128, 1]),
    (1920, 1920, 0, [128, 0, 128, 1]),  # A12: the first replayed query sees itself only
]


@every_how
def test_pivots(how: str) -> None:
    for q_start, start, j, wanted in PIVOTS:
        _, pivots = check(how, V4, [2], [j + 1], [q_start + j + 1], [start], pad=1)
        assert pivots[j] == wanted
        assert pivots[-1] == [0, 0, 0, 0]


@every_how
def test_sequences_without_new_tokens_keep_their_rows(how: str) -> None:
    """A20: q_lens 0, 3, 0."""
    segments, pivots = check(how, V4, [0, 1, 2], [0, 3, 0], [0, 3, 50])
    assert segments == [
        [[-1, 0, 0, 128], UNUSED, UNUSED],
        [[-1, 0, 128, 128], UNUSED, UNUSED],
        [[-1, 0, 256, 78], [2, 0, 334, 50], UNUSED],
    ]
    assert pivots == [[256, 0, 384, n] for n in (1, 2, 3)]


@every_how
def test_a_continuation_uses_its_own_start(how: str) -> None:
    """A7: q_start 0 and 2048 in one batch."""
    _, pivots = check(how, V4, [3, 1], [10, 153], [10, 2201])
    assert pivots[10] == [129, 127, 256 + 10, 1]
    assert pivots[9] == [128, 0, 256, 10]


@every_how
def test_nothing_at_all(how: str) -> None:
    """F12: no sequence, no token, only padding, and a batch of padded sequences."""
    if how == "eager":  # compiled code guards on B >= 2
        segments, pivots = check(how, V4, [], [], [], pad=3)
        assert segments == [] and pivots == [[0, 0, 0, 0]] * 3
        check(how, V4, [], [], [])
    if how != "sm_90" or torch.__version__ >= "2.13":  # code of Inductor 2.11 divides by its number of rows
        check(how, V4, [0, 1], [0, 0], [9, 0])
    segments, pivots = check(how, V4, [-1, -1], [0, 2], [0, 0])
    assert segments == [[[-1, 0, 0, 128], UNUSED, UNUSED], [[-1, 0, 128, 128], UNUSED, UNUSED]]
    assert pivots == [[0, 0, 0, 0]] * 2


BAD = [  # slot, q_len, k_len, valid_start
    (SLOTS, 2, 50, 0),
    (2**31 - 1, 2, 50, 0),
    (-2, 2, 50, 0),
    (1, 2, 1, 0),
    (1, 2, -5, 0),
    (1, 2, 50, 49),
    (1, -3, 50, 0),
    (1, -(2**31), 2**31 - 1, 0),
    (1, 2, -(2**31), 0),
]


@every_how
def test_bad_device_metadata(how: str) -> None:
    """F14: a bad sequence is padded, with one zero segment; its neighbours keep theirs."""
    for bad in BAD:
        ids, q, k, start = ([0, value, 2] for value in bad)
        q[0], k[0], start[0] = 1, 301, 200
        q[2], k[2], start[2] = 3, 50, 0
        count = max(bad[1], 0)
        if how == "eager":
            with pytest.raises(swa.InvalidArgumentError):
                plan(how, V4, ids, q, k, start, 4 + count)
            continue
        got = plan(how, V4, ids, q, k, start, 4 + count)
        q[1] = count
        want = plan("eager", V4, [0, -1, 2], q, k, start, 4 + count)
        for value, expected in zip(got, want, strict=True):
            assert_same(value, expected)
        assert got[0][1].tolist() == [[-1, 0, 128, 128], UNUSED, UNUSED]
        assert (got[1][1 : 1 + count] == 0).all() and (got[2][1 : 1 + count] == -1).all()


@every_how
def test_tokens_past_the_end_are_dropped(how: str) -> None:
    """F14: q_lens that claim more tokens than there are."""
    args = V4, [0, 1], [2, 1000], [300, 2000]
    if how == "eager":
        with pytest.raises(swa.InvalidArgumentError, match="q_lens: got 1002 tokens; allowed: num_tokens=5 at most"):
            plan(how, *args, tokens=5)
        return
    whole = plan("eager", *args)
    for value, expected in zip(plan(how, *args, tokens=5)[1:], whole[1:], strict=True):
        assert_same(value, expected[:5])


def random_batch(rng: random.Random, spec: swa.RingSpec, longest: int) -> tuple[list, list, list, list]:
    n, w = rng.randrange(2, 7), spec.window
    q = [rng.choice([0, 1, rng.randrange(longest)]) for _ in range(n)]
    q_start = [rng.choice([0, rng.randrange(2 * w), rng.randrange(10**6)]) for _ in range(n)]
    start = [rng.choice([0, -2, s, max(s - rng.randrange(2 * w), 0)]) for s in q_start]
    return [rng.randrange(-1, SLOTS) for _ in range(n)], q, [s + x for s, x in zip(q_start, q, strict=True)], start


@pytest.mark.parametrize(
    ("how", "spec", "batches", "longest"),
    [
        ("eager", V4, 30, 300),
        ("eager", SMALL, 60, 30),
        ("cpp", V4, 8, 300),
        ("sm_90", V4, 3, 40),
        ("sm_90", SMALL, 3, 30),
    ],
    ids=["eager-v4", "eager-small", "cpp-v4", "sm_90-v4", "sm_90-small"],
)
def test_random_batches(how: str, spec: swa.RingSpec, batches: int, longest: int) -> None:
    """Equal to the host twin, and the number of visible keys is what the rule says."""
    rng = random.Random(5)
    for _ in range(batches):
        ids, q, k, start = random_batch(rng, spec, longest)
        _, pivots = check(how, spec, ids, q, k, start, pad=rng.randrange(4))
        t = 0
        for i, slot in enumerate(ids):
            for j in range(q[i]):
                n = min(k[i] - q[i] + j + 1 - max(start[i], 0), spec.window) if slot >= 0 else 0
                assert pivots[t][1] + pivots[t][3] == n
                t += 1


def test_workspace_holds_what_the_pivots_name() -> None:
    """Position tags: loaded as planned, the rows of each query's ranges are positions lo..p of its own sequence."""
    rng = random.Random(11)
    for _ in range(40):
        ids, q, k, start = random_batch(rng, SMALL, 20)
        ids = [i if s >= 0 else -1 for i, s in zip(rng.sample(range(SLOTS + 2), len(ids)), ids, strict=True)]
        ids = [i if i < SLOTS else -1 for i in ids]
        rings = {s: {} for s in range(SLOTS)}
        for slot, new, end in zip(ids, q, k, strict=True):
            for p in range(max(end - new - SMALL.rows, 0), end - new) if slot >= 0 else ():
                rings[slot][p % SMALL.rows] = (slot, p)
        segments, pivots, slots, at, starts, first = (x.tolist() for x in plan("eager", SMALL, ids, q, k, start))
        wanted_starts = [e - n if s >= 0 else 0 for s, n, e in zip(ids, q, k, strict=True) for _ in range(n)]
        assert starts == wanted_starts
        workspace: list = [None] * (len(ids) * SMALL.window)
        for src, row, dst, rows in (s for sequence in segments for s in sequence):
            for r in range(rows):
                assert workspace[dst + r] is None
                workspace[dst + r] = "zero" if src < 0 else rings[src][row + r]
        assert None not in workspace
        workspace += list(zip(slots, at, strict=True))
        for (start1, len1, start2, len2), slot, p, lo in zip(pivots, slots, at, first, strict=True):
            seen = workspace[start1 : start1 + len1] + workspace[start2 : start2 + len2]
            wanted = range(max(p - SMALL.window + 1, lo), p + 1) if slot >= 0 else ()
            assert seen == [(slot, x) for x in wanted]


def test_four_kernels_for_any_size() -> None:
    """D11: sums, segments, tokens, pivots; nothing extern, no synchronisation, no index to go out of range."""
    code = runs(V4).code()
    FileCheck().check_not("extern").check_not("torch.ops").check_not(".item()").run(code.call)
    assert code.count("prefill_plan") == 4
    assert "device_assert" not in code.source.replace("tl.device_assert(True", "")
