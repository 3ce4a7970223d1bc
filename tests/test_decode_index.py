"""swa_inductor::decode_index and its host twin: the rows of every query, in eager mode, C++ and sm_90 code."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from numerics import assert_same
from runs import HOW, Runs, ints
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor.testing import generate_code, run_on_cpu

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
SLOTS = 5

every_how = pytest.mark.parametrize("how", HOW)


@cache
def runs(spec: swa.RingSpec, width: int | None = None) -> Runs:
    def fn(ids: torch.Tensor, at: torch.Tensor, start: torch.Tensor):  # noqa: ANN202
        return swa.decode_index(ids, at, spec=spec, num_slots=SLOTS, valid_start=start, width=width)

    return Runs(fn, ints(*range(7)), torch.arange(7), ints(*range(7)))


def twin(spec: swa.RingSpec, ids: list, at: list, start: list, width: int | None = None) -> tuple:
    m = swa.DecodeMetadata.build(
        spec, num_slots=SLOTS, state_ids=ids, positions=at, valid_start=start, width=width or spec.window
    )
    return m.offset_len, m.index


def check(how: str, spec: swa.RingSpec, ids: list, at: list, start: list, width: int | None = None) -> tuple:
    """Runs both, compares them to the bit, returns the result as lists."""
    got = runs(spec, width)(how, ints(*ids), torch.tensor(at, dtype=torch.int64), ints(*start))
    for value, expected in zip(got, twin(spec, ids, at, start, width), strict=True):
        assert_same(value, expected)
    return got[0].tolist(), got[1].tolist()


TABLE = [  # slot, p, lo, n, first row, last row, column at which it wraps
    (0, 0, 0, 1, 0, 0, None),
    (0, 127, 0, 128, 0, 127, None),
    (0, 128, 1, 128, 1, 128, None),
    (0, 133, 6, 128, 6, 133, None),
    (0, 134, 7, 128, 7, 0, 127),
    (0, 261, 134, 128, 0, 127, None),
    (2, 134, 7, 128, 275, 268, 127),
    (3, 1000, 873, 128, 471, 464, 65),
    (3, 50, 0, 51, 402, 452, None),
]


@every_how
def test_table(how: str) -> None:
    """A3: W counts the query itself; p = 127 is the first full window, p = 128 the first that drops position 0."""
    offset_len, index = check(how, V4, [r[0] for r in TABLE], [r[1] for r in TABLE], [0] * len(TABLE))
    for (slot, p, lo, n, first, last, wrap), (offset, length), row in zip(TABLE, offset_len, index, strict=True):
        assert V4.visible(p) == (lo, n)
        assert (offset, length, row[0], row[n - 1]) == (first, n, first, last)
        assert row[n:] == [-1] * (128 - n)
        falls = [c for c in range(1, n) if row[c] < row[c - 1]]
        assert falls == ([] if wrap is None else [wrap])
        if wrap is not None:
            assert row[wrap] == slot * 134


@every_how
def test_valid_start(how: str) -> None:
    """A13, A12: the start of a replay bounds the window in decode too."""
    ids, at, start = [1, 1, 2, 2, 0], [250, 326, 327, 2048, 255], [200, 200, 200, 1920, 127]
    offset_len, index = check(how, V4, ids, at, start)
    assert [n for _, n in offset_len] == [51, 127, 128, 128, 128]
    assert offset_len[0][0] == 134 + 200 % 134 and index[0][51:] == [-1] * 77
    assert offset_len[3][0] == 2 * 134 + 1921 % 134  # 1921..2048, all written after the hit
    assert check(how, V4, [3], [5], [-7]) == check(how, V4, [3], [5], [0])


@every_how
def test_padded_rows_and_no_rows(how: str) -> None:
    """A16, F12: nothing wraps to the last row; whatever else a padded row holds is ignored."""
    offset_len, index = check(how, V4, [-1, 4, -1], [0, 0, 10**12], [0, 0, 5])
    assert offset_len == [[-1, 0], [4 * 134, 1], [-1, 0]]
    assert index[0] == index[2] == [-1] * 128
    if how != "sm_90" or torch.__version__ >= "2.13":  # code of Inductor 2.11 divides by its number of rows
        check(how, V4, [], [], [])


@every_how
def test_a_wider_index_does_not_widen_the_window(how: str) -> None:
    """E6: nor does it have to be a power of two."""
    for width in (134, 140):
        _, index = check(how, V4, [0, 1, -1], [1000, 3, 0], [0, 0, 0], width=width)
        assert [sum(i >= 0 for i in row) for row in index] == [128, 4, 0]
        assert all(row[128:] == [-1] * (width - 128) for row in index)


BAD = [(SLOTS, 5, 0), (2**31 - 1, 5, 0), (-2, 5, 0), (0, -1, 0), (0, -134, 0), (0, 5, 6), (0, -(2**40), 0)]


@every_how
def test_bad_device_metadata(how: str) -> None:
    """F14: compiled code takes what eager mode refuses as padding; the row next to it is served."""
    ids, at, start = ([*values, good] for values, good in zip(zip(*BAD, strict=True), (3, 50, 0), strict=True))
    args = ints(*ids), torch.tensor(at), ints(*start)
    if how == "eager":
        with pytest.raises(swa.InvalidArgumentError):
            runs(V4)(how, *args)
        return
    offset_len, index = runs(V4)(how, *args)
    assert offset_len.tolist() == [[-1, 0]] * len(BAD) + [[402, 51]]
    assert (index[:-1] == -1).all() and index[-1].tolist() == list(range(402, 453)) + [-1] * 77


@pytest.mark.parametrize("d", range(1, 9))
def test_every_position_for_every_step_size(d: int) -> None:
    """A10: host and device agree for D = 1..8, the default and the least ring, p = 0..400."""
    at = list(range(401))
    for rows in (128 + d, 127 + d):
        spec = swa.RingSpec(128, d, 64, ring_rows=rows)
        ids, start = [p % SLOTS for p in at], [p // 3 if p % 7 == 0 else 0 for p in at]
        compiled = {
            (6, 134): HOW,
            (8, 135): ("eager", "sm_90"),
            (1, 128): ("eager", "sm_90"),
        }  # a compile takes seconds
        for how in compiled.get((d, rows), ("eager",)):
            _, index = check(how, spec, ids, at, start)
        for p, row in zip(at, index, strict=True):
            seen = [r for r in row if r >= 0]
            assert [r % rows for r in seen] == [q % rows for q in range(max(p - 127, start[p], 0), p + 1)]


@pytest.mark.parametrize(("shape", "hows"), [((1, 1, None), ["eager"]), ((7, 4, 31), HOW)], ids=str)
def test_random_batches(shape: tuple, hows: list[str]) -> None:
    """Small rings, long sequences, any starts: equal to the host twin."""
    window, d, rows = shape
    spec = swa.RingSpec(window, d, 32, ring_rows=rows)
    rng = random.Random(window)
    for _ in range(5):
        n = rng.randrange(2, 40)
        ids = [rng.randrange(-1, SLOTS) for _ in range(n)]
        at = [rng.choice([rng.randrange(20), rng.randrange(10**6), 2**31 - 2]) for _ in range(n)]
        start = [rng.choice([0, -3, max(p - rng.randrange(2 * window), 0)]) for p in at]
        for how in hows:
            check(how, spec, ids, at, start)


def consumer(ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    _, index = swa.decode_index(ids, at, spec=V4, num_slots=SLOTS)
    return torch.where(index >= 0, index * 2, 7).float()


def test_fuses_with_its_consumer() -> None:
    """One kernel from the metadata to what reads the index; nothing extern, no intermediate."""
    args = ints(0, 3, -1), torch.tensor([5, 1000, 0])
    code = generate_code(consumer, *args)
    FileCheck().check_count(".run(", 1, exactly=True).check_not("extern").check_not("torch.ops").run(code.call)
    assert [a.size for a in code.allocations] == [(3, 128)]
    want = consumer(*args)
    assert_same(run_on_cpu(code, args)[0], want)
    got, (cpp,) = run_and_get_code(torch.compile(consumer, fullgraph=True), *args)
    assert_same(got, want)
    FileCheck().check("def call").check_count("cpp_fused", 1, exactly=True).check_not("extern").check_not(
        "torch.ops"
    ).run(cpp[cpp.index("def call(") : cpp.index("return (", cpp.index("def call("))])


def test_both_results_take_two_kernels() -> None:
    """One loop over [T, 2] and one over [T, W]: no kept intermediate."""
    code = runs(V4).code()
    assert len(code.launches) == 2 and len(code.allocations) == 2
