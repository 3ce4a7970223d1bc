"""swa_inductor::attention_prefill: attention of new tokens over ring history and themselves, before they are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_inductor import checks, checks_values, reference
from swa_inductor.meta._library import define
from swa_inductor.reference_query import Query

SCHEMA = (
    "attention_prefill(Tensor q, Tensor k, Tensor? v, Tensor cache, Tensor state_ids, Tensor positions, "
    "Tensor q_starts, Tensor? valid_start=None, Tensor? sinks=None, Tensor? q_norm_weight=None, Tensor? rope=None, *, "
    "int window, float scale, str kv_format, float? softcap=None, bool return_lse=False, "
    "float? q_norm_eps=None, bool rope_interleaved=True, bool inverse_rope=False) -> (Tensor, Tensor)"
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
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_prefill(
        q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, kv_format, scale, softcap
    )
    tokens, heads, _ = q.shape
    v_dim = (k if v is None else v).shape[2]
    Query(q_norm_weight, rope, **query).check(q, v_dim)
    return q.new_empty((tokens, heads, v_dim)), q.new_empty(
        (tokens, heads) if return_lse else (0,), dtype=torch.float32
    )


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
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_prefill(
        q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, kv_format, scale, softcap
    )
    checks_values.check_values(cache, state_ids, positions, valid_start)
    checks_values.check_new_rows(state_ids, positions, q_starts)
    around = Query(q_norm_weight, rope, **query)
    around.check(q, (k if v is None else v).shape[2])

    def attend(q: Tensor, state_ids: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention_prefill(
            q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, window, scale, kv_format, softcap
        )

    out, lse = around.around(attend, q, state_ids, positions)
    return out.to(q.dtype), lse if return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
