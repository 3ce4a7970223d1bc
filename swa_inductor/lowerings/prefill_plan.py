"""Lowering of swa_inductor::prefill_plan: a reduction over [B, B], one over [T, B], the rest pointwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference_inline
from swa_inductor.lowerings import _inductor


def lower(
    state_ids: Any,
    q_lens: Any,
    k_lens: Any,
    valid_start: Any = None,
    *,
    num_tokens: Any,
    window: int,
    ring_rows: int,
    num_slots: int,
) -> Any:
    fn = partial(reference_inline.prefill_plan, window=window, ring_rows=ring_rows, num_slots=num_slots)
    token = _inductor.arange(num_tokens, state_ids.get_device())
    return _inductor.inline(fn, token, state_ids, q_lens, k_lens, valid_start, recompute=True)


_inductor.lower(torch.ops.swa_inductor.prefill_plan.default, cuda=lower, cpu=lower)
