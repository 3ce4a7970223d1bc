"""swa_inductor::ring_read_raw and ring_write_raw: raw entries in and out, in eager mode, C++ and sm_90 code."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from numerics import assert_same
from runs import HOW, ints
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor.records import RAW_DTYPES
from swa_inductor.testing import generate_code, run_on_cpu

SPECS = [swa.RawRingSpec(4, 6, 16), swa.RawRingSpec(4, 6, 7, "bf16"), swa.RawRingSpec(3, 1, 8, "fp16", entries=5)]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.dtype)
every_how = pytest.mark.parametrize("how", HOW)


@cache
def reader(spec: swa.RawRingSpec):  # noqa: ANN201
    def fn(ring: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return swa.ring_read_raw(ring, *rest[:2], spec=spec, valid_start=rest[2])

    return fn


def read(how: str, spec: swa.RawRingSpec, *args: torch.Tensor) -> torch.Tensor:
    fn = reader(spec)
    if how == "eager":
        return fn(*args)
    if how == "sm_90":
        return run_on_cpu(generate_code(fn, *args), args)[0]
    return torch.compile(fn, fullgraph=True)(*args)


def history(spec: swa.RawRingSpec, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A ring in a strided state, full of NaN bytes but for slot 2, which holds the last of `length` entries."""
    layout = swa.StateLayout([swa.RingSpec(3, 1, 32)], compression=[spec])
    state = torch.full((3, layout.slot_bytes), 0xFF, dtype=torch.uint8)
    ring = layout.compression_view(state, 0)
    values = torch.randn(length, spec.width).to(RAW_DTYPES[spec.dtype])
    ids = torch.full((length,), 2, dtype=torch.int32)
    swa.ring_write_raw(values, ring, ids, torch.arange(length), spec=spec)
    return ring, values


@every_how
@every_spec
def test_reads_the_last_entries_oldest_first(how: str, spec: swa.RawRingSpec) -> None:
    """Bit by bit what was written; absent entries, padded rows and what valid_start excludes are 0 (A13, A16)."""
    length = 3 * spec.entries + 2
    ring, values = history(spec, length)
    ends = [length - 1, length - spec.tokens_per_step, length - 1, 0, length - 1]
    ids, start = [2, 2, -1, -1, 2], [0, 0, 0, 0, length - 2]
    got = read(how, spec, ring, ints(*ids), torch.tensor(ends), ints(*start))
    assert got.shape == (5, spec.ratio, spec.width) and got.dtype == values.dtype
    for row, slot, p, lo in zip(got, ids, ends, start, strict=True):
        for c in range(spec.ratio):
            q = p - spec.ratio + 1 + c
            assert_same(row[c], values[q] if slot >= 0 and q >= lo else torch.zeros_like(values[0]))


@every_how
def test_the_first_entries_of_a_sequence(how: str) -> None:
    """A15: entries before position 0 are 0, whatever the ring holds."""
    spec = SPECS[0]
    ring, values = history(spec, 2)
    got = read(how, spec, ring, ints(2, 2), torch.tensor([0, 1]), ints(0, 0))
    assert_same(got[0], torch.cat([torch.zeros(3, 16), values[:1]]))
    assert_same(got[1], torch.cat([torch.zeros(2, 16), values]))


@pytest.mark.parametrize("how", ["cpp", "sm_90"])
def test_bad_device_metadata(how: str) -> None:
    """F14: read as padding; eager mode refuses it."""
    spec = SPECS[0]
    ring, values = history(spec, 9)
    args = ring, ints(3, 2, 2, -9, 2), torch.tensor([8, -1, 8, 8, 8]), ints(0, 0, 9, 0, 0)
    got = read(how, spec, *args)
    assert not got[:4].any()
    assert_same(got[4], values[5:])
    with pytest.raises(swa.InvalidArgumentError):
        read("eager", spec, *args)


def test_a_rejected_draft_is_overwritten() -> None:
    """A9: ratio + D - 1 entries hold what the first query reads while D new ones are written."""
    spec = SPECS[0]
    ring, values = history(spec, 20)
    new = torch.randn(6, 16)
    for accepted in range(1, 7):
        mine = ring.clone()
        swa.ring_write_raw(new, mine, torch.full((6,), 2, dtype=torch.int32), torch.arange(20, 26), spec=spec)
        got = swa.ring_read_raw(mine, ints(2), torch.tensor([19 + accepted]), spec=spec)
        assert_same(got[0], torch.cat([values, new[:accepted]])[-4:])
        assert_same(swa.ring_read_raw(mine, ints(2), torch.tensor([20]), spec=spec)[0, :3], values[-3:])


def test_fuses_with_its_consumer() -> None:
    """One kernel, straight from the ring to what reads the entries."""
    spec = SPECS[1]
    ring, _ = history(spec, 30)
    args = ring, ints(2, -1), torch.tensor([29, 0]), ints(0, 0)
    entries = reader(spec)

    def fn(*args: torch.Tensor) -> torch.Tensor:
        return entries(*args).float() * 2 + 1

    code = generate_code(fn, *args)
    FileCheck().check_count(".run(", 1, exactly=True).check_not("extern").check_not("torch.ops").run(code.call)
    assert [a.size for a in code.allocations] == [(2, 4, 7)]
    assert_same(run_on_cpu(code, args)[0], fn(*args))
