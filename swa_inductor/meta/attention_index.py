"""swa_inductor::attention_index: attention over the records that an index names, of a ring or any record buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor import checks, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "attention_index(Tensor q, Tensor cache, Tensor index, Tensor? sinks=None, *, float scale, str kv_format, "
    "int? v_head_dim=None, float? softcap=None, bool return_lse=False) -> (Tensor, Tensor)"
)


def fake(
    q: Tensor,
    cache: Tensor,
    index: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_index(q, cache, index, sinks, kv_format, v_head_dim, scale, softcap)
    tokens, heads, dim = q.shape
    out = q.new_empty((tokens, heads, dim if v_head_dim is None else v_head_dim))
    return out, q.new_empty((tokens, heads) if return_lse else (0,), dtype=torch.float32)


def eager(
    q: Tensor,
    cache: Tensor,
    index: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_index(q, cache, index, sinks, kv_format, v_head_dim, scale, softcap)
    out, lse = reference.attention_index(q, cache, index, sinks, scale, kv_format, v_head_dim, softcap)
    return out.to(q.dtype), lse if return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
