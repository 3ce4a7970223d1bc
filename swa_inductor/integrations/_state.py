"""What the layers of a cache share: how far its sequences have come, or whose tokens a forward brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from swa_inductor.errors import InvalidArgumentError, UnsupportedError
from swa_inductor.spec import RingSpec


class NewTokens(NamedTuple):
    """The tokens of a forward, those of a sequence together: N = B * q_len.

    state_ids: int32 [N], -1 for padding. positions: int64 [N]. starts: int64 [N], position of the sequence's first new
    token. valid_start: int32 [N] or None. decode: rows per sequence of a decode step, None for a prefill.
    """

    state_ids: Tensor
    positions: Tensor
    starts: Tensor
    valid_start: Tensor | None
    decode: int | None


class RingState:
    """What the layers of a RingCache share: how far its sequences have come, in tensors that keep their address.

    lengths: int64 [B], tokens of each sequence, padding not counted.
    high_water: int64 [B], one more than the last position ever written.
    columns: int64 [], tokens per sequence that the model was given, padding counted.
    slots: int32 [B], 0 to B - 1.
    limit: tokens that a sequence may hold, None for no limit.
    longest: tokens of the longest sequence, read once per eager prefill; None where the host may not or need not know.
    shortest: the ring with the smallest window: as R = W + D in all of them, it is the first to lose what is needed.
    """

    def __init__(self, batch_size: int, limit: int | None, shortest: RingSpec, device: torch.device) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.high_water = torch.zeros_like(self.lengths)
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.slots = torch.arange(batch_size, dtype=torch.int32, device=device)
        self.batch_size = batch_size
        self.limit, self.shortest = limit, shortest
        self.longest: int | None = None
        for t in (self.lengths, self.high_water, self.columns, self.slots):
            torch._dynamo.mark_static_address(t)

    def intact(self, lengths: Tensor) -> Tensor:
        """bool []: sequences of these lengths, int64 [B], can go on: no record that is still seen is overwritten."""
        oldest = (lengths - self.shortest.window + 1).clamp(min=0)
        return (oldest + self.shortest.rows >= self.high_water).all()

    def begin(self, positions: Tensor) -> None:
        """Check the new positions, int64 [B, q_len], -1 for padding, before the first layer writes; set `longest`.

        They must go on from `lengths`, which those of a mask that forgets history, or was made for another forward, do
        not, and stay below the limit. The rings must be intact, which they may not be after a forward that broke off.
        """
        first = torch.where(positions >= 0, positions, self.lengths[:, None]).amin(1)
        ok = (first == self.lengths).all() & self.intact(self.lengths)
        if self.limit is not None:
            ok = ok & (positions < self.limit).all()
        require_on_device(
            ok,
            "positions of the new tokens",
            lambda: f"{first.tolist()} to {positions.amax(1).tolist()}",
            lambda: (
                f"from {self.lengths.tolist()} on, which an attention_mask must count, below max_length={self.limit}, "
                f"in rings not overwritten since ({self.high_water.tolist()} tokens written)"
            ),
        )
        self.high_water.copy_(torch.maximum(self.high_water, positions.amax(1) + 1))
        prefill = positions.shape[1] > self.shortest.tokens_per_step
        self.longest = int(self.lengths.max()) if prefill and may_sync(positions) else None

    def new_tokens(self, positions: Tensor) -> NewTokens:
        """Sequence b is in slot b; of a few tokens each, all are decoded."""
        batch, q_len = positions.shape
        state_ids = torch.where(positions >= 0, self.slots[:, None], -1).flatten()
        starts = self.lengths[:, None].expand(batch, q_len).flatten()
        decode = q_len if q_len <= self.shortest.tokens_per_step else None
        return NewTokens(state_ids, positions.flatten(), starts, None, decode)

    def advance(self, positions: Tensor) -> None:
        """Count the new tokens, after the last layer."""
        self.lengths.copy_(torch.maximum(self.lengths, positions.amax(1) + 1))
        self.columns.add_(positions.shape[1])


class SlotState:
    """What the layers of a SlotCache share: the tokens of the forward that runs, and all that is known of them."""

    batch_size = 1  # packed

    def __init__(self) -> None:
        self.tokens: NewTokens | None = None

    def begin(self, positions: Tensor) -> None:
        """Nothing to check: metadata is checked where it is made."""

    def new_tokens(self, positions: Tensor) -> NewTokens:
        """The tokens of the forward."""
        if self.tokens is None:
            raise InvalidArgumentError("cache: got a SlotCache outside of TransformersSlotModel; allowed: its methods")
        return self.tokens

    def advance(self, positions: Tensor) -> None:
        """Nothing to count."""

    @property
    def columns(self) -> Tensor:
        """What only a cache of one length has."""
        raise UnsupportedError("a SlotCache has no length: each of its sequences has its own")


def require_on_device(ok: Tensor, name: str, got: Callable[[], str], allowed: Callable[[], str]) -> None:
    """`require` for a condition that is a tensor: an assertion on the device where the host must not wait for it."""
    if may_sync(ok):
        if not ok:
            raise InvalidArgumentError(f"{name}: got {got()}; allowed: {allowed()}")
    else:
        torch._assert_async(ok, f"{name} of a RingCache is not allowed; run the forward uncompiled to see why")


def may_sync(t: Tensor) -> bool:
    """Whether values may be read on the host: neither in a trace nor in a CUDA graph capture."""
    return not torch.compiler.is_compiling() and not (t.is_cuda and torch.cuda.is_current_stream_capturing())
