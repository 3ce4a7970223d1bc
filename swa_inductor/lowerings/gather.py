"""Lowerings of swa_inductor::gather: one Triton kernel on CUDA, C++ on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference
from swa_inductor.lowerings import _attend, _inductor, _records
from swa_inductor.lowerings._template import STORED_TYPES, source, vector_block
from swa_inductor.spec import vector_bytes


def config(widest: int) -> dict[str, Any]:
    """4 warps with 64 values a thread: with 16, 128 sequences take 10.3 us for 9.3 (H200, triton 3.6, 2026-11-30)."""
    return {"BLOCK_N": max(1, 8192 // widest), "num_warps": 4, "num_stages": 1}


def grid(rows: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (cdiv(rows * kv_heads, meta["BLOCK_N"]), 1, 1)


TEMPLATE = _inductor.triton_template("gather", grid, source("gather"))


def lower_cuda(
    cache: Any,
    state_ids: Any,
    q_starts: Any,
    valid_start: Any,
    k: Any,
    v: Any,
    *,
    window: int,
    kv_format: str,
    head_dim: int,
    v_head_dim: int | None,
    dtype: torch.dtype,
) -> tuple[Any, Any]:
    kv_heads, device = _inductor.int_of(cache.get_size()[2]), cache.get_device()
    rows = state_ids.get_size()[0] * window + (0 if k is None else k.get_size()[0])
    out_v = _inductor.empty_buffer([0] if v_head_dim is None else [rows, kv_heads, v_head_dim], dtype, device)
    new = [x for x in (k, v) if x is not None]
    inputs = [*new, cache, state_ids, q_starts, *([] if valid_start is None else [valid_start])]
    if v_head_dim is not None:
        inputs.append(out_v)
    out_k = _inductor.render_template(
        TEMPLATE,
        inputs,
        _inductor.fixed_layout(device, dtype, [rows, kv_heads, head_dim]),
        mutated=[] if v_head_dim is None else [len(inputs) - 1],
        producers=range(len(new)),
        call_sizes=[rows, kv_heads],
        **_records.constants(cache),
        **config(vector_block(max(head_dim, v_head_dim or 0))),
        W=window,
        SHARED_KV=v_head_dim is None,
        HAS_NEW=k is not None,
        HAS_VALID_START=valid_start is not None,
        MXFP8=kv_format == "mxfp8",
        STORED_TYPE=STORED_TYPES[kv_format],
        DOT_TYPE=_attend.DOT_TYPES[dtype],
        K_DIM=head_dim,
        V_DIM=v_head_dim or 0,
        K_BLOCK=vector_block(head_dim),
        V_BLOCK=vector_block(v_head_dim or 0),
        V_OFFSET=vector_bytes(kv_format, head_dim),
    )
    return out_k, out_v


def lower_cpu(
    cache: Any, state_ids: Any, q_starts: Any, valid_start: Any, k: Any, v: Any, **options: Any
) -> tuple[Any, Any]:
    gather = partial(reference.gather, **options)
    # Nothing is kept in between: over loops of several shapes Inductor 2.11 fuses K with V and then fails.
    out_k, out_v = _inductor.inline(gather, cache, state_ids, q_starts, valid_start, k, v, recompute=True)
    if options["v_head_dim"] is None:
        out_v = _inductor.empty_buffer([0], options["dtype"], cache.get_device())
    return out_k, out_v


_inductor.lower(torch.ops.swa_inductor.gather.default, cuda=lower_cuda, cpu=lower_cpu)
