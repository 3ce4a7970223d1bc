"""store, store with norm and RoPE, and norm_store of V4.1 records, read from slices of one merged projection.

Beside them, in the same run: a kernel of one element, a pointwise copy of as many bytes as norm_store moves, and the
chain that it replaces, each part a compiled function of its own: norm and RoPE of k in plain torch, store, norm of q_a.

python -m benchmarks.store [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor.models import deepseek_v4
from swa_inductor.reference_rope import norm_rope, rms_norm

CONFIG = replace(deepseek_v4.V41_FLASH, tokens_per_step=6)
SPEC, EPS, WIDTH = CONFIG.ring, CONFIG.rms_eps, CONFIG.q_lora_rank
TOKENS = (6, 48, 384, 1536, 3072)
MOST_TIES, UNROUNDED = 1e-3, 2e-2
"""Share of bytes that may differ from the reference: sums in another order; no rounding between norm and RoPE."""
MOST_SETS = 400
"""Of inputs: those of few tokens stay in the L2 cache, as behind the projection that writes them."""

Weights = tuple[Tensor, Tensor, Tensor]
"""q_a weight, kv weight, RoPE table."""


def split(merged: Tensor) -> tuple[Tensor, Tensor]:
    q_a, kv = merged.split([WIDTH, SPEC.head_dim], -1)
    return q_a, kv[:, None]


def functions(weights: Weights) -> dict[str, Callable[..., Any]]:
    """What is measured, over (merged, cache, state_ids, positions)."""
    q_a_norm, kv_norm, table = weights
    turn: dict[str, Any] = {"norm_eps": EPS, "norm_weight": kv_norm, "rope": table}

    def store(merged: Tensor, *where: Tensor) -> None:
        swa.store(split(merged)[1], None, *where, spec=SPEC)

    def turned_store(merged: Tensor, *where: Tensor) -> None:
        swa.store(split(merged)[1], None, *where, spec=SPEC, **turn)

    def norm_store(merged: Tensor, *where: Tensor) -> Tensor:
        q_a, kv = split(merged)
        return swa.norm_store(q_a, kv, None, *where, spec=SPEC, x_eps=EPS, x_weight=q_a_norm, **turn)

    return {"store": store, "store, norm, RoPE": turned_store, "norm_store": norm_store}


def chain(weights: Weights, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Tensor]:
    """Three compiled functions, one after the other."""
    q_a_norm, kv_norm, table = weights

    def turn(merged: Tensor, positions: Tensor) -> Tensor:
        return norm_rope(split(merged)[1], positions, kv_norm, EPS, table, True)

    def store(kv: Tensor, *where: Tensor) -> None:
        swa.store(kv, None, *where, spec=SPEC)

    def norm(merged: Tensor) -> Tensor:
        return rms_norm(split(merged)[0], q_a_norm, EPS).to(merged.dtype)

    first, second, third = (compiled(fn) for fn in (turn, store, norm))

    def run(merged: Tensor, cache: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
        second(first(merged, positions), cache, state_ids, positions)
        return third(merged)

    return run


def inputs(tokens: int, sets: int, device: str) -> tuple[Weights, list[tuple[Tensor, ...]]]:
    """Weights, and for each set a merged projection, rings, and steps of 6 tokens somewhere in their sequences."""
    sequences = tokens // 6
    weights = (
        torch.rand(WIDTH, device=device) + 0.5,
        torch.rand(SPEC.head_dim, device=device) + 0.5,
        deepseek_v4.rope_table(CONFIG, 8192, device),
    )
    made = []
    for _ in range(sets):
        starts = torch.randint(8000, (sequences,), device=device)
        positions, owner = _measure.sequences(starts, 6)
        merged = torch.randn(tokens, WIDTH + SPEC.head_dim, device=device, dtype=torch.bfloat16)
        cache = torch.zeros(SPEC.cache_shape(sequences), dtype=torch.uint8, device=device)
        made.append((merged, cache, owner.int(), positions))
    return weights, made


def check(
    step: Callable[..., Any], want: Callable[..., Any], args: tuple[Tensor, ...], ties: float = MOST_TIES
) -> None:
    """Bytes, and rows if there are any, are those of the eager function but for ties."""
    merged, cache, *where = args
    got_cache, want_cache = cache.clone(), cache.clone()
    got, wanted = step(merged, got_cache, *where), want(merged, want_cache, *where)
    share = float((got_cache != want_cache).float().mean() * cache.shape[1] / 6)  # of the rows of the step
    if share > ties or not bool(want_cache.any()):
        raise SystemExit(f"{share:.1e} of the bytes are not what the reference writes")
    if wanted is not None:
        _measure.require_close("rows of q_a", got, wanted, MOST_TIES)


def run() -> list[dict[str, Any]]:
    rows = []
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    least = _measure.microseconds(_measure.compiled(torch.neg), [(one,)] * 100)
    for tokens in TOKENS:
        moved = tokens * (4 * WIDTH + 2 * SPEC.head_dim + SPEC.record_bytes)
        weights, made = inputs(tokens, min(_measure.copies(moved), MOST_SETS), "cuda")
        eager = functions(weights)
        row: dict[str, Any] = {"tokens": tokens, "one element us": least}
        for name, fn in eager.items():
            step = _measure.compiled(fn)
            check(step, fn, made[0])
            row[f"{name} us"] = _measure.microseconds(step, made)
        torch._dynamo.reset()
        parts = chain(weights, lambda fn: torch.compile(fn, fullgraph=True, dynamic=False))
        check(parts, eager["norm_store"], made[0], UNROUNDED)
        row["chain us"] = _measure.microseconds(parts, made)
        row |= {"pointwise us": _measure.copy_us(moved), "MB moved": moved / 1e6}
        rows.append(row | {"norm_store / one element": row["norm_store us"] / least})
    return rows


if __name__ == "__main__":
    _measure.report("store", run)
