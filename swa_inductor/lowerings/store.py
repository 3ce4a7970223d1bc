"""Lowerings of swa_inductor::store: one Triton kernel on CUDA, an in-place C++ scatter on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from swa_inductor import records, reference
from swa_inductor.lowerings import _inductor
from swa_inductor.lowerings._template import STORED_TYPES, next_power_of_2, source, vector_block
from swa_inductor.meta._store import Write
from swa_inductor.reference_rope import rms_norm, rotate, within
from swa_inductor.spec import vector_bytes


def config(head_dim: int) -> dict[str, int]:
    """One record per program; a warp for every 256 values keeps a vector in 8 registers a thread."""
    return {"BLOCK_M": 1, "num_warps": max(1, next_power_of_2(head_dim) // 256), "num_stages": 1}


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (cdiv(tokens * kv_heads, meta["BLOCK_M"]), 1, 1)


TEMPLATE = _inductor.triton_template("store", grid, source("store"))


def launch(
    template: Any,
    layout: Any,
    write: Write,
    *,
    x: Any = None,
    x_weight: Any = None,
    v_back: Any = None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Launch a template of the family; `x` and `x_weight` come before k, `v_back`, which is written, comes last;
    `more`: constants beside those of store."""
    k, v, rope = write.k, write.v, write.rope
    named = {"x": x, "x_weight": x_weight, "k": k, "v": v, "cache": write.cache, "state_ids": write.state_ids}
    named |= {"positions": write.positions, "norm_weight": write.norm_weight, "rope": rope, "v_back": v_back}
    present = [name for name, node in named.items() if node is not None]
    # K that is normalised or rotated is read more than once, so it comes from memory.
    fusable = {"x", "v"} if write.norm_eps is not None or rope is not None else {"x", "k", "v"}
    tokens, kv_heads, _ = k.get_size()
    dim, v_dim = _inductor.int_of(k.get_size()[2]), 0 if v is None else _inductor.int_of(v.get_size()[2])
    constants = {
        **config(max(dim, v_dim)),
        "SHARED_KV": v is None,
        "MXFP8": write.kv_format == "mxfp8",
        "STORED_TYPE": STORED_TYPES[write.kv_format],
        "K_DIM": dim,
        "V_DIM": v_dim,
        "K_BLOCK": vector_block(dim),
        "V_BLOCK": vector_block(v_dim),
        "V_OFFSET": vector_bytes(write.kv_format, dim),
        "MIN_AMAX_BITS": records.float_bits(write.min_amax),
        "NORM_EPS": write.norm_eps or 0.0,
        "NORM_WEIGHT_GIVEN": write.norm_weight is not None,
        "ROPE_DIM": 0 if rope is None else _inductor.int_of(rope.get_size()[1]),
        "ROPE_INTERLEAVED": write.rope_interleaved,
    }
    return _inductor.render_template(
        template,
        [named[name] for name in present],
        layout,
        mutated=[present.index(name) for name in ("cache", "v_back") if name in present],
        producers=[i for i, name in enumerate(present) if name in fusable],
        call_sizes=[tokens, kv_heads],
        **{**constants, **(more or {})},
    )


def lower_cuda(*args: Any, **options: Any) -> None:
    write = Write(*args, **options)
    tokens, kv_heads, _ = write.k.get_size()
    # The kernel writes the cache as a mutated input; a template must have an output, here `done` [T * H_kv].
    done = _inductor.fixed_layout(write.k.get_device(), torch.int8, [tokens * kv_heads])
    launch(TEMPLATE, done, write)


def rounded(fn: Callable[..., Any], x: Any, *nodes: Any) -> Any:
    """fn(x, *nodes) in the dtype of x, in memory: what a loop goes on with would not be rounded."""
    out = _inductor.inline(lambda x, *rest: fn(x, *rest).to(x.dtype), x, *nodes)
    out.realize()
    return out


def write_cpu(write: Write) -> Any:
    """The write in C++; returns K as it is cast, after norm and RoPE."""
    k, cache, state_ids, positions, rope = write.k, write.cache, write.state_ids, write.positions, write.rope
    eps = write.norm_eps
    if eps is not None:
        k = rounded(partial(rms_norm, eps=eps), k, write.norm_weight)
    if rope is not None:
        k = rounded(lambda k, at, table: rotate(k, at, table, write.rope_interleaved), k, positions, rope)
        state_ids = _inductor.inline(within, rope, state_ids, positions)
    if _inductor.known_int(k.get_size()[0]) != 0:
        plan = partial(reference.store_plan, kv_format=write.kv_format, min_amax=write.min_amax)
        slot, row, stored = _inductor.inline(plan, k, write.v, cache, state_ids, positions)
        _inductor.index_put(cache, [slot, row], stored)
    return k


def lower_cpu(*args: Any, **options: Any) -> None:
    write_cpu(Write(*args, **options))


_inductor.lower(torch.ops.swa_inductor.store.default, cuda=lower_cuda, cpu=lower_cpu)
