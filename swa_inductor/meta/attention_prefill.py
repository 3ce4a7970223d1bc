"""swa_inductor::attention_prefill: attention of new tokens over ring history and themselves, before they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor import checks, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "attention_prefill(Tensor q, Tensor k, Tensor? v, Tensor cache, Tensor state_ids, Tensor positions, "
    "Tensor q_starts, Tensor? valid_start=None, Tensor? sinks=None, *, int window, float scale, str kv_format, "
    "float? softcap=None, bool return_lse=False) -> (Tensor, Tensor)"
)


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_prefill(
        q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, kv_format, softcap
    )
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, (k if v is None else v).shape[2]))
    return out, q.new_empty((tokens, heads) if return_lse else (0,), dtype=torch.float32)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_prefill(
        q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, kv_format, softcap
    )
    checks.check_values(cache, state_ids, positions, valid_start)
    out, lse = reference.attention_prefill(
        q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, scale, kv_format, softcap
    )
    return out.to(q.dtype), lse if return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
