"""RMSNorm and RoPE as the ops apply them to q, k and outputs: the meaning, and the checks of their arguments.

A RoPE table is fp32 [num_positions, rope_dim]: cos, then sin, of each position and pair. It turns the *last* rope_dim
dims of a vector, as adjacent pairs (`interleaved`: dims 2i and 2i + 1) or as halves (dims i and i + rope_dim / 2). A
row whose position lies beyond the table has bad metadata: it counts as a padded row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from swa_inductor.errors import require


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, not rounded to the dtype of x: in fp32, or fp64 of fp64."""
    y = x if x.dtype == torch.float64 else x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(y.dtype)


def rotate(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """RoPE of x [T, heads, dim] at `positions` [T] (`inverse`: turn back), not rounded: in fp32, or fp64 of fp64.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair; positions outside of the table read its first or last row.
    """
    y = x if x.dtype == torch.float64 else x.float()
    cos, sin = table[positions.clamp(0, table.shape[0] - 1)].to(y.dtype)[:, None].chunk(2, -1)
    sin = -sin if inverse else sin
    rest, turned = y.split([y.shape[-1] - table.shape[1], table.shape[1]], -1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.cat([rest, torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)], -1)


def norm_rope(
    x: Tensor,
    positions: Tensor,
    weight: Tensor | None,
    eps: float | None,
    table: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """x [T, heads, dim] as a ring stores it: norm unless eps is None, RoPE if there is a table, each rounded once."""
    if eps is not None:
        x = rms_norm(x, weight, eps).to(x.dtype)
    return x if table is None else rotate(x, positions, table, interleaved).to(x.dtype)


def within(table: Tensor | None, state_ids: Tensor, positions: Tensor) -> Tensor:
    """state_ids with -1, a padded row, where the position lies beyond the table."""
    return state_ids if table is None else torch.where(positions < table.shape[0], state_ids, -1)


def check_norm(name: str, x: Tensor, weight: Tensor | None, eps: float | None) -> None:
    """Arguments of an RMSNorm over the last dim of `x`: `name`_weight [dim] and `name`_eps; eps None for no norm."""
    require(eps is None or 0 < eps < math.inf, f"{name}_eps", eps, "None (no norm) or a positive number")
    if weight is None:
        return
    require(eps is not None, f"{name}_eps", None, f"a positive number with {name}_weight")
    dim = x.shape[-1]
    require(
        weight.dtype in (torch.bfloat16, torch.float16, torch.float32), f"{name}_weight dtype", weight.dtype, "float"
    )
    require(weight.dim() == 1, f"{name}_weight shape", tuple(weight.shape), f"[{dim}]")
    require(weight.shape[0] == dim, f"{name}_weight shape", tuple(weight.shape), f"[{dim}]")
    require(weight.device == x.device, f"{name}_weight device", weight.device, str(x.device))


def check_rope(table: Tensor | None, x: Tensor, interleaved: bool, **dims: Any) -> None:
    """A RoPE table for vectors like `x`; `dims`: of each kind of vector that it turns, by name."""
    if table is None:
        return
    require(table.dtype == torch.float32, "rope dtype", table.dtype, "torch.float32")
    what = "[num_positions, rope_dim], cos then sin, rope_dim even"
    require(table.dim() == 2, "rope shape", tuple(table.shape), what)
    require(table.shape[0] >= 1, "rope shape", tuple(table.shape), "at least one position")
    require(table.stride(1) == 1, "rope stride(1)", table.stride(1), "1")
    require(table.device == x.device, "rope device", table.device, str(x.device))
    rope_dim = table.shape[1]
    for name, dim in dims.items():
        ok = rope_dim % 2 == 0 and 2 <= rope_dim <= dim
        require(ok, "rope shape", tuple(table.shape), f"{what}, from 2 to {name}={dim}")
        require(not interleaved or dim % 2 == 0, name, dim, "an even number with rope_interleaved")
