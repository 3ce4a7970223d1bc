"""Lowering of swa_inductor::prefill_index: pointwise IR that fuses with what reads it, on every device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference_inline
from swa_inductor.lowerings import _inductor


def lower(pivots: Any, *, window: int) -> Any:
    return _inductor.inline(partial(reference_inline.prefill_index, window=window), pivots, recompute=True)


_inductor.lower(torch.ops.swa_inductor.prefill_index.default, cuda=lower, cpu=lower)
