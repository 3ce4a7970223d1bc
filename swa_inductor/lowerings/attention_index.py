"""Lowerings of swa_inductor::attention_index: one Triton kernel on CUDA; on the CPU a call of the eager code."""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _attend, _inductor
from swa_inductor.lowerings._template import source, vector_block


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any]) -> tuple[Any, Any, int]:
    return (tokens * meta["ROW_BLOCKS"], kv_heads, 1)


TEMPLATE = _inductor.triton_template("attention_index", grid, source("attention_index"))


def lower_cuda(
    q: Any,
    cache: Any,
    index: Any,
    sinks: Any = None,
    *,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    dim, kv_heads = _inductor.int_of(q.get_size()[2]), _inductor.int_of(cache.get_size()[2])
    groups = _inductor.int_of(q.get_size()[1]) // kv_heads
    card = torch.cuda.get_device_properties(q.get_device())
    options = _attend.config(groups, vector_block(max(dim, v_head_dim or 0)), q.get_dtype(), card)
    return _attend.launch(
        TEMPLATE,
        [q, cache, index],
        sinks,
        dims=(dim, v_head_dim),
        kv_heads=kv_heads,
        cache=cache,
        kv_format=kv_format,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        options=options,
        G=groups,
        ROW_BLOCKS=-(-groups // options["BLOCK_M"]),
    )


_inductor.lower(torch.ops.swa_inductor.attention_index.default, cuda=lower_cuda, cpu=None)
