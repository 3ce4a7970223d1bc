"""The state of sequences: what a slot holds, byte by byte, and who owns a slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from swa_inductor.errors import OutOfSlotsError, require, require_each, require_integer
from swa_inductor.spec import RawRingSpec, RingSpec

ALIGNMENT = 32
"""Bytes that each ring of a slot is padded to a multiple of: kernels read 16 bytes at a time, with room to grow."""

POISON = 0xFF
"""Byte that marks rows as not valid: a NaN in every record format, so that reading one shows."""


def _padded(ring: RingSpec) -> int:
    return -(-ring.ring_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StateLayout:
    """Where the rings of all layers lie in the slot of a sequence.

    A slot holds, in this order: the *stored* rings, which an external store saves and restores as one run of bytes; the
    *dropped* rings, which their layers rebuild by replay; the compression state. Rings are never shared between layers.

    Args:
        stored: rings of the stored layers.
        dropped: rings of the layers that rebuild theirs.
        compression: raw rings of the layers that compress tokens.

    Raises:
        InvalidArgumentError: no ring at all, or what is no ring.
    """

    stored: Sequence[RingSpec]
    dropped: Sequence[RingSpec] = ()
    compression: Sequence[RawRingSpec] = ()

    def __post_init__(self) -> None:
        for name, kind in (("stored", RingSpec), ("dropped", RingSpec), ("compression", RawRingSpec)):
            rings = require_each(name, getattr(self, name), kind, f"a {kind.__name__}")
            object.__setattr__(self, name, rings)
        require(len(self._rings) > 0, "stored", "no ring", "at least one ring in stored, dropped or compression")

    @property
    def _rings(self) -> list[RingSpec]:
        return [*self.stored, *self.dropped, *(raw.ring for raw in self.compression)]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each ring in a slot: stored, dropped, compression; multiples of 32."""
        return tuple(accumulate([0, *map(_padded, self._rings)]))[:-1]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored rings of a slot, its prefix; 1,415,040 for 20 rings of 134 records of 528 bytes."""
        return sum(map(_padded, self.stored))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(map(_padded, self._rings))

    def allocate(self, num_slots: int, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed state, uint8 [num_slots, slot_bytes]; at least one slot."""
        require_integer("num_slots", num_slots)
        return torch.zeros(num_slots, self.slot_bytes, dtype=torch.uint8, device=device)

    def stored_view(self, state: Tensor, i: int) -> Tensor:
        """Cache of stored layer `i`: a view uint8 [num_slots, R, H_kv, record] with stride(0) = slot_bytes.

        Raises:
            InvalidArgumentError: a state of another layout, or no such layer.
        """
        return self._view(state, "stored", i, 0, len(self.stored))

    def dropped_view(self, state: Tensor, i: int) -> Tensor:
        """Cache of dropped layer `i`; as `stored_view`."""
        return self._view(state, "dropped", i, len(self.stored), len(self.dropped))

    def compression_view(self, state: Tensor, i: int) -> Tensor:
        """Raw ring of compressing layer `i`: a view uint8 [num_slots, entries, 1, entry bytes]; as `stored_view`."""
        return self._view(state, "compression", i, len(self.stored) + len(self.dropped), len(self.compression))

    def export_slot(self, state: Tensor, slot: int) -> Tensor:
        """Copy of the stored rings of a slot, uint8 [stored_bytes], for an external store.

        Raises:
            InvalidArgumentError: a state of another layout, or no such slot.
        """
        self._check_slot(state, slot)
        return state[slot, : self.stored_bytes].clone()

    def import_slot(self, state: Tensor, slot: int, data: Tensor) -> None:
        """Restore the stored rings of a slot from what `export_slot` gave.

        The dropped rings and the compression state of the slot are not valid afterwards and hold NaN codes: their
        layers must replay the last tokens with `valid_start` at the first replayed position.

        Raises:
            InvalidArgumentError: a state of another layout, no such slot, or data of another size or dtype.
        """
        self._check_slot(state, slot)
        require(isinstance(data, Tensor), "data", type(data).__name__, "a tensor")
        require(data.dtype == torch.uint8, "data dtype", data.dtype, "torch.uint8")
        wanted = (self.stored_bytes,)
        require(tuple(data.shape) == wanted, "data shape", tuple(data.shape), f"{wanted}, the stored rings of a slot")
        state[slot, : self.stored_bytes].copy_(data)
        state[slot, self.stored_bytes :].fill_(POISON)

    def _view(self, state: Tensor, part: str, i: int, first: int, count: int) -> Tensor:
        self._check_state(state)
        allowed = f"0 to {count - 1}" if count else f"none, there is no {part} ring"
        require(isinstance(i, int) and 0 <= i < count, f"{part} layer", i, allowed)
        ring, offset = self._rings[first + i], self.offsets[first + i]
        return state[:, offset : offset + ring.ring_bytes].view(ring.cache_shape(state.shape[0]))

    def _check_state(self, state: Tensor) -> None:
        require(isinstance(state, Tensor), "state", type(state).__name__, "a tensor")
        require(state.dtype == torch.uint8, "state dtype", state.dtype, "torch.uint8")
        ok = state.dim() == 2 and state.shape[1] == self.slot_bytes and state.stride(1) == 1
        require(ok, "state shape", tuple(state.shape), f"[num_slots, slot_bytes={self.slot_bytes}], adjacent bytes")

    def _check_slot(self, state: Tensor, slot: int) -> None:
        self._check_state(state)
        good = isinstance(slot, int) and 0 <= slot < state.shape[0]
        require(good, "slot", slot, f"0 to {state.shape[0] - 1}")


class Slot(NamedTuple):
    """A slot in the hands of one owner: `id` goes into `state_ids`, `generation` tells owners of the same id apart."""

    id: int
    generation: int


class SlotAllocator:
    """Hands out state slots so that no slot has a new owner while a step of its last owner is in flight.

    An engine that runs ahead launches step n + 1 before it has seen the end of step n, so a sequence found finished may
    still be part of launched steps. Call `begin_step` before each launch and `settle` once a step is known to be over
    (its event, or its results on the host): a slot freed meanwhile waits for every step launched before it was freed.

    A slot keeps the bytes of its last owner. The new owner cannot see them: positions below 0 are never visible, and an
    owner that starts further in (a prefix hit, a replay) passes `valid_start` = the first position it writes itself.

    Not thread-safe: one scheduler owns it.

    Args:
        num_slots: slots of the state, at least one.
    """

    def __init__(self, num_slots: int) -> None:
        require_integer("num_slots", num_slots)
        self.num_slots = num_slots
        self._free = deque(range(num_slots))  # first in, first out: the bytes of a finished owner rest longest
        self._generation = [0] * num_slots
        self._live: set[int] = set()
        self._waiting: deque[tuple[int, int]] = deque()  # (step, id), steps in order
        self._launched = 0
        self._settled = 0

    def allocate(self) -> Slot:
        """A slot that no live owner and no step in flight uses.

        Raises:
            OutOfSlotsError: there is none.
        """
        if not self._free:
            raise OutOfSlotsError(
                f"no free slot: {len(self._live)} of {self.num_slots} live, "
                f"{len(self._waiting)} waiting for steps {self._settled + 1} to {self._launched} to settle"
                if self._waiting
                else f"no free slot: {len(self._live)} of {self.num_slots} live"
            )
        slot = self._free.popleft()
        self._generation[slot] += 1
        self._live.add(slot)
        return Slot(slot, self._generation[slot])

    def free(self, slot: Slot) -> None:
        """Give a slot back; it waits until every step launched so far has settled.

        Raises:
            InvalidArgumentError: the slot has been freed already, or belongs to a later owner.
        """
        require(isinstance(slot, Slot), "slot", repr(slot), "a Slot that `allocate` gave")
        good = isinstance(slot.id, int) and 0 <= slot.id < self.num_slots
        require(good, "slot", slot, f"an id from 0 to {self.num_slots - 1}")
        generation = self._generation[slot.id]
        require(slot.generation == generation, "slot", slot, f"generation {generation}, the latest owner's")
        require(slot.id in self._live, "slot", f"{slot}, freed before", "a live slot")
        self._live.remove(slot.id)
        if self._settled == self._launched:
            self._free.append(slot.id)
        else:
            self._waiting.append((self._launched, slot.id))

    def begin_step(self) -> int:
        """Number of the step about to be launched, from 1; it is in flight until it settles."""
        self._launched += 1
        return self._launched

    def settle(self, step: int) -> None:
        """All steps up to `step` are over on the device: slots that waited for them become free.

        Raises:
            InvalidArgumentError: the step has not been launched.
        """
        good = isinstance(step, int) and 0 <= step <= self._launched
        require(good, "step", step, f"a launched step, up to {self._launched}")
        self._settled = max(self._settled, step)
        while self._waiting and self._waiting[0][0] <= self._settled:
            self._free.append(self._waiting.popleft()[1])
