"""Lowerings of swa_inductor::attention: one Triton kernel on CUDA; on the CPU the op stays a call of the eager code."""

from __future__ import annotations

import math
from typing import Any

import torch

from swa_inductor.lowerings import _inductor
from swa_inductor.lowerings._template import next_power_of_2, source
from swa_inductor.spec import MXFP8_BLOCK, vector_bytes

DOT_TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}


def config(rows: int, k_block: int, v_block: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes for `rows` = D * G query rows, chosen so that no kernel spills (ptxas, sm_80, sm_90, sm_100)."""
    widest = max(k_block, v_block)
    if dtype == torch.float32:
        # No tensor cores at full precision: small tiles keep operands and accumulator in registers.
        block_m, block_n, num_warps, num_stages = 16, 16 if widest > 128 else 32, 8 if widest > 128 else 4, 1
    else:
        block_m = min(max(16, next_power_of_2(rows)), 64)  # a tensor-core tile has at least 16 rows
        if widest > 256:
            block_m, block_n, num_warps, num_stages = min(block_m, 32), 16, 8, 1
        elif widest > 128:
            block_n, num_warps, num_stages = (32, 8, 1) if block_m == 64 else (32, 4, 2)
        else:
            block_n, num_warps, num_stages = 64, 4, 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return (cdiv(tokens, meta["D"]) * meta["ROW_BLOCKS"], kv_heads, 1)


TEMPLATE = _inductor.triton_template("attention", grid, source("attention"))


def lower_cuda(
    q: Any,
    cache: Any,
    state_ids: Any,
    positions: Any,
    valid_start: Any = None,
    sinks: Any = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    tokens_per_step: int = 1,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    tokens, heads, head_dim = q.get_size()
    dim, kv_heads = _inductor.int_of(head_dim), _inductor.int_of(cache.get_size()[2])
    groups = _inductor.int_of(heads) // kv_heads
    out_dim = dim if v_head_dim is None else v_head_dim
    k_block, v_block = max(MXFP8_BLOCK, next_power_of_2(dim)), max(MXFP8_BLOCK, next_power_of_2(out_dim))
    device, dtype = q.get_device(), q.get_dtype()
    options = config(tokens_per_step * groups, k_block, v_block, dtype)
    # An op has two outputs, a template one: the lse is a buffer that the kernel writes as a mutated input.
    lse = _inductor.empty_buffer([tokens, heads] if return_lse else [0], torch.float32, device)
    inputs = [x for x in (q, cache, state_ids, positions, valid_start, sinks) if x is not None]
    if return_lse:
        inputs.append(lse)
    out = _inductor.render_template(
        TEMPLATE,
        inputs,
        _inductor.fixed_layout(device, dtype, [tokens, heads, out_dim]),
        mutated=[len(inputs) - 1] if return_lse else [],
        producers=[0],
        call_sizes=[tokens, kv_heads],
        **options,
        D=tokens_per_step,
        G=groups,
        ROW_BLOCKS=-(-tokens_per_step * groups // options["BLOCK_M"]),
        WINDOW=window,
        SCALE=float(scale),
        SOFTCAP=float(softcap or 0.0),
        LOG2E=math.log2(math.e),
        SHARED_KV=v_head_dim is None,
        HAS_VALID_START=valid_start is not None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=return_lse,
        MXFP8=kv_format == "mxfp8",
        STORED_TYPE={"mxfp8": "tl.uint8", "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}[kv_format],
        DOT_TYPE=DOT_TYPES[dtype],
        IEEE=dtype == torch.float32,
        K_DIM=dim,
        V_DIM=out_dim,
        OUT_DIM=out_dim,
        K_BLOCK=k_block,
        V_BLOCK=v_block,
        V_OFFSET=vector_bytes(kv_format, dim),
    )
    return out, lse


_inductor.lower(torch.ops.swa_inductor.attention.default, cuda=lower_cuda, cpu=None)
