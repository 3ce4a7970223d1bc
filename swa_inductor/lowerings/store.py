"""Lowerings of swa_inductor::store: one Triton kernel on CUDA, an in-place C++ scatter on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import records, reference
from swa_inductor.lowerings import _inductor
from swa_inductor.lowerings._template import STORED_TYPES, next_power_of_2, source, vector_block
from swa_inductor.spec import vector_bytes


def config(head_dim: int) -> dict[str, int]:
    """One record per program; a warp for every 256 values keeps a vector in 8 registers a thread."""
    return {"BLOCK_M": 1, "num_warps": max(1, next_power_of_2(head_dim) // 256), "num_stages": 1}


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (cdiv(tokens * kv_heads, meta["BLOCK_M"]), 1, 1)


TEMPLATE = _inductor.triton_template("store", grid, source("store"))


def constants(k: Any, v: Any, kv_format: str, min_amax: float) -> dict[str, Any]:
    """Constants of the template for K and V of these shapes."""
    dim, v_dim = _inductor.int_of(k.get_size()[2]), 0 if v is None else _inductor.int_of(v.get_size()[2])
    return {
        **config(max(dim, v_dim)),
        "SHARED_KV": v is None,
        "MXFP8": kv_format == "mxfp8",
        "STORED_TYPE": STORED_TYPES[kv_format],
        "K_DIM": dim,
        "V_DIM": v_dim,
        "K_BLOCK": vector_block(dim),
        "V_BLOCK": vector_block(v_dim),
        "V_OFFSET": vector_bytes(kv_format, dim),
        "MIN_AMAX_BITS": records.float_bits(min_amax),
    }


def lower_cuda(k: Any, v: Any, cache: Any, state_ids: Any, positions: Any, *, kv_format: str, min_amax: float) -> None:
    tokens, kv_heads, _ = k.get_size()
    vectors = [k] if v is None else [k, v]
    # The kernel writes the cache as a mutated input; a template must have an output, here `done` [T * H_kv].
    _inductor.render_template(
        TEMPLATE,
        [*vectors, cache, state_ids, positions],
        _inductor.fixed_layout(k.get_device(), torch.int8, [tokens * kv_heads]),
        mutated=[len(vectors)],
        producers=range(len(vectors)),
        call_sizes=[tokens, kv_heads],
        **constants(k, v, kv_format, min_amax),
    )


def lower_cpu(k: Any, v: Any, cache: Any, state_ids: Any, positions: Any, *, kv_format: str, min_amax: float) -> None:
    if _inductor.known_int(k.get_size()[0]) == 0:
        return
    plan = partial(reference.store_plan, kv_format=kv_format, min_amax=min_amax)
    slot, row, records = _inductor.inline(plan, k, v, cache, state_ids, positions)
    _inductor.index_put(cache, [slot, row], records)


_inductor.lower(torch.ops.swa_inductor.store.default, cuda=lower_cuda, cpu=lower_cpu)
