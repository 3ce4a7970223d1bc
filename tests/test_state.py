"""StateLayout and SlotAllocator: bytes of a slot, views, export and import, owners of slots."""

from __future__ import annotations

import random

import pytest
import torch
from numerics import assert_same

import swa_inductor as swa

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
ODD = swa.RingSpec(5, 2, 96, kv_format="mxfp8", num_kv_heads=3)  # 7 * 3 * 198 = 4,158 bytes, padded to 4,160
RAW = swa.RawRingSpec(4, 6, 7, "bf16")  # 9 * 14 = 126 bytes, padded to 128
LAYOUT = swa.StateLayout([V4, ODD], [ODD, V4], [RAW, swa.RawRingSpec(128, 6, 16)])


def test_the_numbers_of_the_model_that_set_them() -> None:
    layout = swa.StateLayout([V4] * 20, [V4] * 3, [swa.RawRingSpec(4, 6, 512)])
    assert layout.stored_bytes == 20 * 134 * 528 == 1_415_040
    assert layout.slot_bytes == 23 * 70_752 + 9 * 512 * 4
    assert layout.offsets == tuple(i * 70_752 for i in range(24))


def test_order_and_padding() -> None:
    assert ODD.ring_bytes == 4158 and RAW.ring.ring_bytes == 126
    assert LAYOUT.offsets == (0, 70_752, 74_912, 79_072, 149_824, 149_952)
    assert LAYOUT.stored_bytes == 74_912
    assert LAYOUT.slot_bytes == 149_952 + 133 * 64
    assert swa.StateLayout([], compression=[swa.RawRingSpec(1, 1, 4)] * 2).offsets == (0, 32)
    assert all(offset % 32 == 0 for offset in LAYOUT.offsets) and LAYOUT.slot_bytes % 32 == 0


@pytest.mark.parametrize("d", range(1, 9))
def test_raw_ring(d: int) -> None:
    """A10: ratio + D - 1 entries by default and at least."""
    spec = swa.RawRingSpec(4, d, 16)
    assert spec.entries == 3 + d and spec.ring.cache_shape(2) == (2, 3 + d, 1, 64)
    assert swa.RawRingSpec(4, d, 16, "bf16", entries=20).ring.cache_shape(2) == (2, 20, 1, 32)
    with pytest.raises(swa.InvalidArgumentError, match=f"R={2 + d} .*= {3 + d}"):
        swa.RawRingSpec(4, d, 16, entries=2 + d)
    with pytest.raises(swa.InvalidArgumentError, match="dtype: got 'mxfp8'; allowed: one of 'bf16', 'fp16', 'fp32'"):
        swa.RawRingSpec(4, d, 16, "mxfp8")
    with pytest.raises(swa.InvalidArgumentError, match="width: got 0"):
        swa.RawRingSpec(4, d, 0)
    with pytest.raises(swa.InvalidArgumentError, match="entries: got 20.0; allowed: an integer of at least 1"):
        swa.RawRingSpec(4, d, 16, entries=20.0)  # type: ignore[arg-type]


def views(state: torch.Tensor) -> list[torch.Tensor]:
    return [
        *(LAYOUT.stored_view(state, i) for i in range(2)),
        *(LAYOUT.dropped_view(state, i) for i in range(2)),
        *(LAYOUT.compression_view(state, i) for i in range(2)),
    ]


def test_views_are_rings_of_the_state() -> None:
    """B11: strided views of one buffer that share no byte; stride(0) is the slot."""
    state = LAYOUT.allocate(3)
    assert state.shape == (3, LAYOUT.slot_bytes) and state.dtype == torch.uint8 and not state.any()
    rings = [V4, ODD, ODD, V4, RAW.ring, swa.RawRingSpec(128, 6, 16).ring]
    for i, (view, ring, offset) in enumerate(zip(views(state), rings, LAYOUT.offsets, strict=True)):
        assert view.shape == ring.cache_shape(3) and view.untyped_storage().data_ptr() == state.data_ptr()
        assert view.storage_offset() == offset and view.stride(0) == LAYOUT.slot_bytes and view.stride(3) == 1
        assert not view.any()
        view.fill_(i + 1)
    assert sum(int((state[2] == i + 1).sum()) for i in range(6)) == sum(ring.ring_bytes for ring in rings)
    part = torch.zeros(5, LAYOUT.slot_bytes, dtype=torch.uint8)[1:4]
    assert LAYOUT.stored_view(part, 1).storage_offset() == LAYOUT.slot_bytes + 70_752


def test_views_serve_the_ops() -> None:
    """Store and decode through views of layers of different geometry; nothing outside the rows changes."""
    state = torch.randint(0, 256, (3, LAYOUT.slot_bytes), dtype=torch.uint8)
    before = state.clone()
    ids, at = torch.tensor([2, 2, -1], dtype=torch.int32), torch.tensor([133, 134, 0])
    swa.store(torch.randn(3, 3, 96), torch.randn(3, 3, 96), LAYOUT.stored_view(state, 1), ids, at, spec=ODD)
    values = torch.randn(3, 7).bfloat16()
    swa.ring_write_raw(values, LAYOUT.compression_view(state, 0), ids, at, spec=RAW)
    got = swa.ring_read_raw(LAYOUT.compression_view(state, 0), ids[1:2], at[1:2], spec=RAW)
    assert_same(got[0, 2:], values[:2])
    changed = (state != before).nonzero()
    assert set(changed[:, 0].tolist()) == {2}
    allowed = [70_752 + (p % 7) * 594 + b for p in (133, 134) for b in range(594)]
    allowed += [149_824 + (p % 9) * 14 + b for p in (133, 134) for b in range(14)]
    assert set(changed[:, 1].tolist()) <= set(allowed)


def test_export_and_import() -> None:
    """The stored rings move; what they do not cover is poisoned, never a foreign sequence's rows (A11)."""
    state = torch.randint(0, 255, (3, LAYOUT.slot_bytes), dtype=torch.uint8)
    saved = LAYOUT.export_slot(state, 1)
    assert saved.shape == (74_912,) and saved.data_ptr() != state[1].data_ptr()
    want = state.clone()
    LAYOUT.import_slot(state, 2, saved)
    want[2, :74_912] = want[1, :74_912]
    want[2, 74_912:] = 0xFF
    assert_same(state, want)
    for i in range(2):
        assert_same(LAYOUT.stored_view(state, i)[2], LAYOUT.stored_view(state, i)[1])


def test_slots_are_handed_out_once() -> None:
    """D13 in the small: ids stay below num_slots, and exhaustion is an error that says why."""
    allocator = swa.SlotAllocator(3)
    slots = [allocator.allocate() for _ in range(3)]
    assert sorted(s.id for s in slots) == [0, 1, 2]
    with pytest.raises(swa.OutOfSlotsError, match="no free slot: 3 of 3 live"):
        allocator.allocate()
    allocator.free(slots[1])
    assert allocator.allocate().id == slots[1].id


def test_an_old_handle_frees_nothing() -> None:
    """F4: the generation tells the second owner of a slot from the first."""
    allocator = swa.SlotAllocator(1)
    first = allocator.allocate()
    allocator.free(first)
    with pytest.raises(swa.InvalidArgumentError, match="freed before; allowed: a live slot"):
        allocator.free(first)
    second = allocator.allocate()
    assert second.id == first.id and second.generation == first.generation + 1
    with pytest.raises(swa.InvalidArgumentError, match="slot: got .*; allowed: generation 2, the latest owner's"):
        allocator.free(first)
    with pytest.raises(swa.InvalidArgumentError, match="an id from 0 to 0"):
        allocator.free(swa.Slot(1, 1))
    allocator.free(second)


def test_a_slot_waits_for_the_steps_that_may_use_it() -> None:
    """F1, F4: step 2 was launched before the end of the sequence was seen, so its slot waits for step 2."""
    allocator = swa.SlotAllocator(1)
    a = allocator.allocate()
    assert [allocator.begin_step(), allocator.begin_step()] == [1, 2]
    allocator.free(a)
    assert allocator.begin_step() == 3
    for settled in (0, 1):
        allocator.settle(settled)
        with pytest.raises(swa.OutOfSlotsError, match="1 waiting for steps"):
            allocator.allocate()
    allocator.settle(2)
    assert allocator.allocate().id == a.id
    with pytest.raises(swa.InvalidArgumentError, match="step: got 4; allowed: a launched step, up to 3"):
        allocator.settle(4)
    allocator.settle(1)  # late news changes nothing


def test_random_schedules_never_share_a_slot_with_a_step_in_flight() -> None:
    """F1, F4, F9: an engine that runs up to three steps ahead; an owner stays in the steps launched before its end."""
    rng = random.Random(3)
    allocator = swa.SlotAllocator(6)
    live: list[swa.Slot] = []
    in_flight: dict[int, set[swa.Slot]] = {}
    for _ in range(3000):
        action = rng.random()
        if action < 0.3:
            busy = {s.id for slots in in_flight.values() for s in slots if s not in live}
            try:
                slot = allocator.allocate()
            except swa.OutOfSlotsError:
                assert len(live) == 6 or in_flight  # a slot may wait longer than it must, never for nothing
                continue
            assert slot.id not in busy and slot.id not in {s.id for s in live}
            live.append(slot)
        elif action < 0.5 and live:
            allocator.free(live.pop(rng.randrange(len(live))))
        elif action < 0.8 and len(in_flight) < 3:
            in_flight[allocator.begin_step()] = set(live)
        elif in_flight:
            step = min(in_flight)
            del in_flight[step]
            allocator.settle(step)


def test_a_new_owner_cannot_see_the_old_rows() -> None:
    """A11: a reused slot full of NaN codes, a new owner from position 0, and one that replays from 1920."""
    spec = swa.RingSpec(16, 2, 64, shared_kv=True)
    layout = swa.StateLayout([spec])
    state = layout.allocate(2)
    cache = layout.stored_view(state, 0)
    for first in (0, 1920):
        state.fill_(0x7F)
        at = torch.arange(first, first + 5)
        ids = torch.ones(5, dtype=torch.int32)
        start = torch.full((5,), first, dtype=torch.int32)
        kv, q = torch.randn(5, 1, 64), torch.randn(5, 4, 64)
        swa.store(kv, None, cache, ids, at, spec=spec)
        got = swa.attention(q, cache, ids, at, spec=spec, valid_start=start)
        state.zero_()
        swa.store(kv, None, cache, ids, at, spec=spec)
        assert got.isfinite().all()
        assert_same(got, swa.attention(q, cache, ids, at, spec=spec, valid_start=start))
