"""Lowerings of swa_inductor::attention_workspace: one Triton kernel on CUDA; on the CPU a call of the eager code."""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _attend, _inductor
from swa_inductor.lowerings._template import source, vector_block


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return (cdiv(tokens, meta["BLOCK_T"]), kv_heads * meta["HEAD_BLOCKS"], 1)


TEMPLATE = _inductor.triton_template("attention_workspace", grid, source("attention_workspace"))


def lower_cuda(
    q: Any,
    k: Any,
    v: Any,
    pivots: Any,
    sinks: Any = None,
    *,
    window: int,
    scale: float,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    dim, kv_heads = _inductor.int_of(q.get_size()[2]), _inductor.int_of(k.get_size()[1])
    v_head_dim = None if v is None else _inductor.int_of(v.get_size()[2])
    groups = _inductor.int_of(q.get_size()[1]) // kv_heads
    card = torch.cuda.get_device_properties(q.get_device())
    options = _attend.config(64, vector_block(max(dim, v_head_dim or 0)), q.get_dtype(), card)
    return _attend.launch(
        TEMPLATE,
        [x for x in (q, k, v, pivots) if x is not None],
        sinks,
        dims=(dim, v_head_dim),
        kv_heads=kv_heads,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        options=options | _attend.token_tiles(groups, options["BLOCK_M"]),
        WINDOW=window,
    )


_inductor.lower(torch.ops.swa_inductor.attention_workspace.default, cuda=lower_cuda, cpu=None)
