"""Lowerings of swa_inductor::attention_prefill: one Triton kernel on CUDA; on the CPU a call of the eager code."""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _attend, _inductor
from swa_inductor.lowerings._template import next_power_of_2, source, vector_block
from swa_inductor.reference_query import Query


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return (cdiv(tokens, meta["BLOCK_T"]), kv_heads * meta["HEAD_BLOCKS"], 1)


def tokens_that_share(tokens: int, processors: int) -> int:
    """Tokens of a program that reads their window once: as many as leave a program for every processor, up to 16."""
    return min(next_power_of_2(-(-tokens // processors)), 16)


TEMPLATE = _inductor.triton_template("attention_prefill", grid, source("attention_prefill"))


def lower_cuda(
    q: Any,
    k: Any,
    v: Any,
    cache: Any,
    state_ids: Any,
    positions: Any,
    q_starts: Any,
    valid_start: Any = None,
    sinks: Any = None,
    q_norm_weight: Any = None,
    rope: Any = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Any, Any]:
    dim, kv_heads = _inductor.int_of(q.get_size()[2]), _inductor.int_of(cache.get_size()[2])
    v_head_dim = None if v is None else _inductor.int_of(v.get_size()[2])
    groups = _inductor.int_of(q.get_size()[1]) // kv_heads
    around = Query(q_norm_weight, rope, **query)
    card, options = torch.cuda.get_device_properties(q.get_device()), None
    if v_head_dim is None:
        tile = _attend.token_tiles(groups, 128)
        columns = kv_heads * tile["HEAD_BLOCKS"]
        shared = tokens_that_share(_inductor.likely_int(q.get_size()[0], 4096) * columns, card.multi_processor_count)
        block_t = max(tile["BLOCK_T"], shared)
        options = _attend.resident(128, block_t, dim, window, q.get_dtype(), card, around, widest=128)
    if options is None:
        options = _attend.prefill_config(vector_block(max(dim, v_head_dim or 0)), q.get_dtype(), card) | {"TILES": ()}
    return _attend.launch(
        TEMPLATE,
        [x for x in (q, k, v, cache, state_ids, positions, q_starts, valid_start) if x is not None],
        sinks,
        dims=(dim, v_head_dim),
        kv_heads=kv_heads,
        cache=cache,
        kv_format=kv_format,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        query=around,
        options=options
        | _attend.token_tiles(groups, options["BLOCK_M"])
        | ({"BLOCK_T": block_t} if options["TILES"] else {}),
        WINDOW=window,
        HAS_VALID_START=valid_start is not None,
    )


_inductor.lower(torch.ops.swa_inductor.attention_prefill.default, cuda=lower_cuda, cpu=None)
