"""swa_inductor::attention: sliding-window attention that reads its keys from the rings, without an index tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_inductor import checks, checks_values, reference
from swa_inductor.meta._library import define
from swa_inductor.reference_query import Query

SCHEMA = (
    "attention(Tensor q, Tensor cache, Tensor state_ids, Tensor positions, Tensor? valid_start=None, "
    "Tensor? sinks=None, Tensor? q_norm_weight=None, Tensor? rope=None, *, int window, float scale, str kv_format, "
    "int? v_head_dim=None, int tokens_per_step=1, float? softcap=None, bool return_lse=False, "
    "float? q_norm_eps=None, bool rope_interleaved=True, bool inverse_rope=False) -> (Tensor, Tensor)"
)


def fake(
    q: Tensor,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    tokens_per_step: int = 1,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_attention(
        q,
        cache,
        state_ids,
        positions,
        valid_start,
        sinks,
        window,
        kv_format,
        v_head_dim,
        tokens_per_step,
        scale,
        softcap,
    )
    tokens, heads, dim = q.shape
    v_dim = dim if v_head_dim is None else v_head_dim
    Query(q_norm_weight, rope, **query).check(q, v_dim)
    return q.new_empty((tokens, heads, v_dim)), q.new_empty(
        (tokens, heads) if return_lse else (0,), dtype=torch.float32
    )


def eager(
    q: Tensor,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    tokens_per_step: int = 1,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_attention(
        q,
        cache,
        state_ids,
        positions,
        valid_start,
        sinks,
        window,
        kv_format,
        v_head_dim,
        tokens_per_step,
        scale,
        softcap,
    )
    checks_values.check_values(cache, state_ids, positions, valid_start, tokens_per_step)
    around = Query(q_norm_weight, rope, **query)
    around.check(q, q.shape[2] if v_head_dim is None else v_head_dim)

    def attend(q: Tensor, state_ids: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(
            q, cache, state_ids, positions, valid_start, sinks, window, scale, kv_format, v_head_dim, softcap
        )

    out, lse = around.around(attend, q, state_ids, positions)
    return out.to(q.dtype), lse if return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
