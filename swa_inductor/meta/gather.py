"""swa_inductor::gather: the workspace of a prefill: history rows from the rings, dequantised, then the new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor import checks, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "gather(Tensor cache, Tensor state_ids, Tensor q_starts, Tensor? valid_start, Tensor? k, Tensor? v, *, "
    "int window, str kv_format, int head_dim, int? v_head_dim, ScalarType dtype) -> (Tensor, Tensor)"
)


def fake(
    cache: Tensor,
    state_ids: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    *,
    window: int,
    kv_format: str,
    head_dim: int,
    v_head_dim: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    checks.check_gather(cache, state_ids, q_starts, valid_start, k, v, window, kv_format, head_dim, v_head_dim, dtype)
    rows = state_ids.shape[0] * window + (0 if k is None else k.shape[0])
    heads = cache.shape[2]
    out_v = (0,) if v_head_dim is None else (rows, heads, v_head_dim)
    return cache.new_empty((rows, heads, head_dim), dtype=dtype), cache.new_empty(out_v, dtype=dtype)


def eager(
    cache: Tensor,
    state_ids: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    *,
    window: int,
    kv_format: str,
    head_dim: int,
    v_head_dim: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    checks.check_gather(cache, state_ids, q_starts, valid_start, k, v, window, kv_format, head_dim, v_head_dim, dtype)
    out_k, out_v = reference.gather(
        cache, state_ids, q_starts, valid_start, k, v, window, kv_format, head_dim, v_head_dim, dtype
    )
    return out_k, out_k.new_empty(0) if v_head_dim is None else out_v


define(SCHEMA, fake=fake, eager=eager)
