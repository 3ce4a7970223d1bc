"""The mask function of "swa_ring": what transformers takes for an attention mask is the ring position of new tokens."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.integrations._state import require_on_device

IMPLEMENTATION = "swa_ring"
"""Name of the attention implementation and of the mask function that belongs to it."""


class QueryOffset(NamedTuple):
    """Ring position of the next token of each sequence, int64 [B]. Not a tensor, so that no other mask can use it."""

    lengths: Tensor

    def __radd__(self, other: Any) -> NoReturn:
        raise_other_implementation("query offset")


def raise_other_implementation(what: str) -> NoReturn:
    """Raise what says the cause, where the code of another attention implementation was given a RingCache."""
    raise InvalidArgumentError(
        f"attention implementation: got another one, which took the {what} of a RingCache for its own; "
        f"allowed: {IMPLEMENTATION!r}, which RingCache.from_model sets and use_stock takes back"
    )


def ring_positions(
    batch_size: int,
    q_length: int,
    kv_length: Tensor,
    q_offset: QueryOffset,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The mask function: int64 [B, 1, 1, q_len], ring position of every new token, -1 for padding.

    4-D, because transformers passes a 4-D mask on as it is, also where `generate` has prepared it beforehand.

    Args:
        kv_length: int64 [], columns of history and new tokens (`RingCache.get_mask_sizes`).
        q_offset: tokens of each sequence so far (`RingCache.get_query_offset`).
        attention_mask: bool [B, columns or more], False for padding.

    Raises:
        UnsupportedError: a mask that is not causal or sliding-window causal.
        InvalidArgumentError: another cache or none, another batch size, or a padding mask that does not fit.
    """
    if not isinstance(q_offset, QueryOffset):
        raise InvalidArgumentError(f"cache: got none or no RingCache; allowed: a RingCache, with {IMPLEMENTATION!r}")
    # Overlays of the caller come with `use_vmap`, blocks as or_masks, and only bidirectional masks may be skipped so.
    plain = mask_function is causal_mask_function or (local_size is not None and mask_function.__name__ == "and_mask")
    if use_vmap or not plain or "allow_is_bidirectional_skip" in kwargs:
        raise UnsupportedError(
            "a mask that is not plainly causal or sliding (overlay, blocks, bidirectional): rings cannot serve it"
        )
    lengths = q_offset.lengths
    require(lengths.shape[0] == batch_size, "batch size", batch_size, f"{lengths.shape[0]}, that of the RingCache")
    new = torch.arange(q_length, device=lengths.device)
    if attention_mask is None:
        return (lengths[:, None] + new)[:, None, None]
    require(
        attention_mask.dim() == 2 and attention_mask.shape[0] == batch_size,
        "attention_mask shape",
        tuple(attention_mask.shape),
        f"[{lengths.shape[0]}, tokens so far, the new ones included]",
    )
    start = kv_length - q_length
    _check_padding(attention_mask, start, q_length, lengths)
    real = attention_mask.index_select(1, start + new)
    return torch.where(real, lengths[:, None] + real.cumsum(1) - 1, -1)[:, None, None]


def _check_padding(mask: Tensor, start: Tensor, q_length: int, lengths: Tensor) -> None:
    """A mask, bool [B, columns], reaches the last token, has the history as stored, and pads only at the ends."""
    column = torch.arange(mask.shape[1], device=mask.device)
    history = (mask & (column < start)).sum(1)
    new = mask & (column >= start) & (column < start + q_length)
    runs = (new.int().diff(dim=1, prepend=torch.zeros_like(new[:, :1], dtype=torch.int32)) > 0).sum(1)
    require_on_device(
        (history == lengths).all() & (runs <= 1).all() & (start + q_length <= mask.shape[1]),
        "attention_mask",
        lambda: f"{mask.shape[1]} columns, {history.tolist()} tokens of history, {runs.tolist()} runs of new tokens",
        lambda: f"{int(start) + q_length} columns or more, {lengths.tolist()} tokens of history, one run at most",
    )
