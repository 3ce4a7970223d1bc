"""The mask function of "swa_ring": what transformers takes for an attention mask is the ring position of new tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


_made = threading.local()


@contextmanager
def made_once() -> Iterator[None]:
    """Within, for the masks of one forward: all types of layers get the same tensor, which is computed once."""
    _made.masks = []
    try:
        yield
    finally:
        del _made.masks


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
    made = [] if torch.compiler.is_compiling() else getattr(_made, "masks", [])
    if not made:
        made.append(_positions(lengths, q_length, kv_length, attention_mask))
    return made[0]


def _positions(lengths: Tensor, q_length: int, kv_length: Tensor, attention_mask: Tensor | None) -> Tensor:
    new = torch.arange(q_length, device=lengths.device)
    if attention_mask is None:
        return (lengths[:, None] + new)[:, None, None]
    require(
        attention_mask.dim() == 2 and attention_mask.shape[0] == lengths.shape[0],
        "attention_mask shape",
        tuple(attention_mask.shape),
        f"[{lengths.shape[0]}, tokens so far, the new ones included]",
    )
    require_on_device(
        kv_length <= attention_mask.shape[1],
        "attention_mask",
        lambda: f"{attention_mask.shape[1]} columns",
        lambda: f"{int(kv_length)} columns or more, the history included",
    )
    # Counted by the mask alone: RingState.begin refuses what does not go on from the tokens that are stored. `generate`
    # runs this on the host for every token, where each operation counts.
    number = (attention_mask.cumsum(1) * attention_mask).index_select(1, kv_length - q_length + new)
    if q_length > 1:
        real = (number > 0).int()
        runs = (real.diff(dim=1, prepend=torch.zeros_like(real[:, :1])) > 0).sum(1)
        require_on_device(
            (runs <= 1).all(),
            "attention_mask",
            lambda: f"{runs.tolist()} runs of new tokens",
            lambda: "one run at most, with padding before and behind it",
        )
    return (number - 1)[:, None, None]
