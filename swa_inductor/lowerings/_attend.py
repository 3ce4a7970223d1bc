"""What the attention lowerings share: launch configurations, the constants of the templates, the two outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from swa_inductor.lowerings import _inductor, _records
from swa_inductor.lowerings._template import STORED_TYPES, next_power_of_2, vector_block
from swa_inductor.reference_query import PLAIN, Query
from swa_inductor.spec import MXFP8_BLOCK, vector_bytes

DOT_TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}


def reads_shared_memory(card: Any) -> bool:
    """Whether tensor cores take operands from shared memory (wgmma, tcgen05); with mma.sync they lie in registers."""
    return card.major in (9, 10)


def config(rows: int, widest: int, dtype: torch.dtype, card: Any, keys: int = 0) -> dict[str, int]:
    """Tile sizes for `rows` query rows and vectors of `widest` values; few or no spills (benchmarks/portability.py).

    `keys`: of the whole window, where a program may have it to itself. One query of Gemma 3 4B (two rows of 256 values,
    1,024 keys) took 66 us for 64 sequences, with two stages 120 us and with 64 keys 67 to 70; one of gpt-oss (8 rows of
    64 values, 128 keys) 8.6 us, with tiles of 64 keys 9.1 and of 32 keys 10.3 (H200, triton 3.6, 2026-11-30).
    """
    if dtype == torch.float32:
        # No tensor cores at full precision: small tiles keep operands and accumulator in registers.
        block_m, num_stages = 16, 1
        block_n = 16 if widest > 64 else 32
        num_warps = 16 if widest > 256 else 8 if widest > 128 else 4
    else:
        block_m = min(max(16, next_power_of_2(rows)), 64)  # a tensor-core tile has at least 16 rows, of tcgen05 64
        small = 64 < widest <= 256 and (not reads_shared_memory(card) or (card.major == 10 and block_m < 64))
        block_m = min(block_m, 32) if small else block_m
        if widest > 256:
            block_m, block_n, num_warps, num_stages = min(block_m, 32), 16, 8, 1
        elif widest > 128:
            block_n, num_warps, num_stages = (32, 8, 1) if block_m == 64 else (32, 4, 3 if block_m == 16 else 2)
        elif widest <= 64 < keys <= 128 and block_m == 16:
            block_n, num_warps, num_stages = 128, 4, 1
        else:
            block_n, num_warps, num_stages = 32 if small else 64, 4, 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}


def variants(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What max_autotune tries beside `options` of tiles: as many rows, so that scratch and grid stay what they are."""
    n, warps, stages = options["BLOCK_N"], options["num_warps"], options["num_stages"]
    tried = [(n, warps, stages + 1), (2 * n, warps, stages), (2 * n, 2 * warps, stages), (n, 2 * warps, stages)]
    tried += [(n // 2, warps, stages + 1)] if n > 16 else []
    return [dict(zip(("BLOCK_N", "num_warps", "num_stages"), one, strict=True)) for one in tried if one[1] <= 16]


def prefill_config(widest: int, dtype: torch.dtype, card: Any) -> dict[str, int]:
    """As `config` for a kernel with two kinds of keys, which leave fewer registers: smaller tiles of keys.

    Up to 40 words a thread still spill, the most with norm and RoPE of 256 values (benchmarks/README.md).
    """
    options = config(64, widest, dtype, card)
    if dtype != torch.float32:
        options["BLOCK_N"] = 16 if widest > 128 else 32
    return options


def resident(
    block_m: int,
    tokens: int,
    dim: int,
    window: int,
    dtype: torch.dtype,
    card: Any,
    query: Query,
    widest: int = 256,
) -> dict[str, Any] | None:
    """Options of a program of `block_m` rows, 64 or 128, of `tokens` tokens, that keeps their whole window with K = V.

    `widest`: columns of a slice at most. Dims that RoPE turns are a slice of their own.

    None where it does not fit or has not been seen to pay. A decode step of V4, 6 x 64 rows, takes 12.4, 16.5, 44.7 and
    130 us for 1, 8, 64 and 256 sequences, 64 rows a program for the first two, where tiles of 16 keys took 20.9, 48.8,
    287 and 1,140 (H200, triton 3.6, 2026-11-30).
    """
    if dtype == torch.float32 or dim < 128 or dim != next_power_of_2(dim) or not reads_shared_memory(card):
        return None
    block_n, warps = (128, 4) if block_m == 64 else (64, 8)
    whole, rest = divmod(window + tokens - 1, block_n)
    tiles = (block_n,) * whole + ((max(16, next_power_of_2(rest)),) if rest else ())
    columns = min(dim, 32 * warps, widest)
    turned = rope_dim(query)
    if turned and (turned != next_power_of_2(turned) or not MXFP8_BLOCK <= turned <= columns):
        return None
    if query.q_norm_eps is not None and dtype == torch.float16:
        return None  # q is normed behind the product: before, q times its weight may be beyond fp16
    if 2 * (sum(tiles) * dim + block_m * columns) > card.shared_memory_per_block_optin:
        return None
    return {
        "BLOCK_M": block_m,
        "TILES": tiles,
        "SLICES": slices(dim, columns, turned),
        "num_warps": warps,
        "num_stages": 1,
    }


def slices(dim: int, widest: int, turned: int) -> tuple[tuple[int, int, int], ...]:
    """Runs of columns (first, slices, width): powers of two up to `widest`, and the last `turned` by themselves."""
    runs, first, width = [], 0, widest
    while first < dim - turned:
        count = (dim - turned - first) // width
        if count:
            runs.append((first, count, width))
            first += count * width
        width //= 2
    return (*runs, (first, 1, turned)) if turned else tuple(runs)


def rope_dim(query: Query) -> int:
    """Dims that RoPE turns."""
    return 0 if query.rope is None else _inductor.int_of(query.rope.get_size()[1])


def token_tiles(groups: int, block_m: int) -> dict[str, int]:
    """A tile of `block_m` rows as BLOCK_T tokens times HEADS of the `groups` query heads of a KV head."""
    heads = min(next_power_of_2(groups), block_m)
    return {"HEADS": heads, "BLOCK_T": block_m // heads, "HEAD_BLOCKS": -(-groups // heads), "G": groups}


GATHERED_Q_BYTES = 160 << 10
"""Shared memory of the kernels at most where q is looked up by an index in front of them: Triton 3.6 moves a tile of
64-bit indices through it (ptxas, 2026-11-30); cards that have less do the look-up in a kernel of its own."""


def launch(
    template: Any,
    inputs: Sequence[Any],
    sinks: Any,
    *,
    dims: tuple[int, int | None],
    kv_heads: int,
    cache: Any = None,
    kv_format: str | None = None,
    scale: float,
    softcap: float | None,
    return_lse: bool,
    options: dict[str, Any],
    query: Query = PLAIN,
    scratch: Sequence[Any] = (),
    **constants: Any,
) -> tuple[Any, Any]:
    """Launch an attention template; `inputs` starts with q, `dims` are those of K and of V (None when K = V).

    `cache` and `kv_format`: the records among the inputs, if any. `scratch`: buffers that the kernel uses for itself,
    last among its arguments.
    """
    q = inputs[0]
    tokens, heads, _ = q.get_size()
    dim, v_head_dim = dims
    v_dim = dim if v_head_dim is None else v_head_dim
    device, dtype = q.get_device(), q.get_dtype()
    card: Any = torch.cuda.get_device_properties(device)
    # An op has two outputs, a template one: the lse is a buffer that the kernel writes as a mutated input.
    lse = _inductor.empty_buffer([tokens, heads] if return_lse else [0], torch.float32, device)
    read = [*inputs, *(x for x in (sinks, query.q_norm_weight, query.rope) if x is not None)]
    nodes = [*read, *([lse] if return_lse else []), *scratch]
    out = _inductor.render_template(
        template,
        nodes,
        _inductor.fixed_layout(device, dtype, [tokens, heads, v_dim]),
        mutated=range(len(read), len(nodes)),
        producers=[0],  # of a q that is loaded by load_input
        gathers=card.shared_memory_per_block_optin >= GATHERED_Q_BYTES,
        call_sizes=[tokens, kv_heads],
        **options,
        **constants,
        **(_records.constants(cache) if cache is not None else {}),
        SCALE=float(scale),
        SOFTCAP=float(softcap or 0.0),
        LOG2E=math.log2(math.e),
        SHARED_KV=v_head_dim is None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=return_lse,
        HAS_Q_NORM_WEIGHT=query.q_norm_weight is not None,
        Q_NORM_EPS=float(query.q_norm_eps or 0.0),
        ROPE_DIM=rope_dim(query),
        ROPE_INTERLEAVED=query.rope_interleaved,
        INVERSE_ROPE=query.inverse_rope,
        MXFP8=kv_format == "mxfp8",
        STORED_TYPE=STORED_TYPES[kv_format] if kv_format else "None",
        DOT_TYPE=DOT_TYPES[dtype],
        IEEE=dtype == torch.float32,
        K_DIM=dim,
        V_DIM=v_dim,
        K_BLOCK=vector_block(dim),
        V_BLOCK=vector_block(v_dim),
        V_OFFSET=vector_bytes(kv_format, dim) if kv_format else 0,
    )
    return out, lse
