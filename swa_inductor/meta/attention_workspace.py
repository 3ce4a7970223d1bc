"""swa_inductor::attention_workspace: attention over two row ranges of a dequantised workspace per query."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor import checks, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "attention_workspace(Tensor q, Tensor k, Tensor? v, Tensor pivots, Tensor? sinks=None, *, int window, "
    "float scale, float? softcap=None, bool return_lse=False) -> (Tensor, Tensor)"
)


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    pivots: Tensor,
    sinks: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_workspace(q, k, v, pivots, sinks, window, scale, softcap)
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, (k if v is None else v).shape[2]))
    return out, q.new_empty((tokens, heads) if return_lse else (0,), dtype=torch.float32)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    pivots: Tensor,
    sinks: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.check_attention_workspace(q, k, v, pivots, sinks, window, scale, softcap)
    out, lse = reference.attention_workspace(q, k, v, pivots, sinks, window, scale, softcap)
    return out.to(q.dtype), lse if return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
