"""Lowering of swa_inductor::ring_read_raw: a masked gather that fuses with what reads it, on every device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference_inline
from swa_inductor.lowerings import _inductor
from swa_inductor.records import RAW_DTYPES


def lower(cache: Any, state_ids: Any, positions: Any, valid_start: Any = None, *, window: int, kv_format: str) -> Any:
    fn = partial(reference_inline.ring_read_raw, window=window, dtype=RAW_DTYPES[kv_format])
    return _inductor.inline(fn, cache, state_ids, positions, valid_start)


_inductor.lower(torch.ops.swa_inductor.ring_read_raw.default, cuda=lower, cpu=lower)
