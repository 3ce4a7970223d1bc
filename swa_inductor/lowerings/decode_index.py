"""Lowering of swa_inductor::decode_index: pointwise IR that fuses with what reads it, on every device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference_inline
from swa_inductor.lowerings import _inductor


def lower(
    state_ids: Any,
    positions: Any,
    valid_start: Any = None,
    *,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
) -> Any:
    fn = partial(
        reference_inline.decode_index,
        window=window,
        ring_rows=ring_rows,
        num_slots=num_slots,
        width=window if width is None else width,
    )
    return _inductor.inline(fn, state_ids, positions, valid_start, recompute=True)


_inductor.lower(torch.ops.swa_inductor.decode_index.default, cuda=lower, cpu=lower)
