"""Inputs of the op tests: one seeded builder, and the grid of geometries that every test of an op walks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import swa_inductor as swa

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A geometry: the ring, the query heads, the dtype of the vectors, and the optional inputs of attention."""

    name: str
    spec: swa.RingSpec
    heads: int
    dtype: torch.dtype = BF16
    sinks: bool = False
    valid_start: bool = False
    softcap: float | None = None
    slots: int = 4


def _spec(window: int, step: int, dim: int, **kw: object) -> swa.RingSpec:
    return swa.RingSpec(window, step, dim, **kw)  # type: ignore[arg-type]


CASES = [
    Case("v4", _spec(128, 6, 512, shared_kv=True), 8, sinks=True),
    Case("v4-tight-ring", _spec(128, 6, 512, shared_kv=True, ring_rows=133), 5),
    Case("gemma3", _spec(512, 1, 256, kv_format="bf16"), 4),
    Case("gemma3-fp32", _spec(64, 2, 256, kv_format="fp32"), 4, FP32),
    Case("gemma2-softcap", _spec(96, 3, 256, num_kv_heads=2, kv_format="bf16"), 4, softcap=50.0),
    Case("gpt-oss", _spec(128, 4, 64, num_kv_heads=2, kv_format="bf16"), 16, sinks=True, valid_start=True),
    Case("mimo", _spec(48, 3, 192, v_head_dim=128, num_kv_heads=2, kv_format="mxfp8"), 8, sinks=True, valid_start=True),
    Case("odd-group", _spec(40, 5, 96, num_kv_heads=2, kv_format="mxfp8"), 6, FP16),
    Case("mha-fp16", _spec(33, 2, 64, num_kv_heads=3, kv_format="fp16"), 3, FP16, valid_start=True),
    Case("window-1", _spec(1, 1, 64, kv_format="bf16"), 2),
    Case("fp32-mxfp8", _spec(70, 2, 128, shared_kv=True), 3, FP32, sinks=True, softcap=20.0),
    Case("narrow-v", _spec(20, 8, 128, v_head_dim=64, kv_format="bf16"), 1),
]
BY_NAME = {case.name: case for case in CASES}


def vectors(case: Case, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    """New k, v (None when K = V) and q for `tokens` tokens."""
    g = torch.Generator().manual_seed(seed)
    spec = case.spec

    def randn(heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=g).to(case.dtype)

    k = randn(spec.num_kv_heads, spec.head_dim)
    v = None if spec.v_head_dim is None else randn(spec.num_kv_heads, spec.v_head_dim)
    return k, v, randn(case.heads, spec.head_dim)


def steps(case: Case, starts: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
    """state_ids and positions of a decode step, tokens_per_step tokens of each sequence; slot -1: a padded sequence."""
    d = case.spec.tokens_per_step
    state_ids = torch.tensor(slots, dtype=torch.int32).repeat_interleave(d)
    positions = (torch.tensor(starts)[:, None] + torch.arange(d)).flatten()
    return state_ids, torch.where(state_ids >= 0, positions, -1)


def filled_cache(case: Case, seed: int = 1) -> Tensor:
    """A cache in which every row of every slot holds a random record."""
    cache = torch.zeros(case.spec.cache_shape(case.slots), dtype=torch.uint8)
    rows = case.spec.rows
    for slot in range(case.slots):
        k, v, _ = vectors(case, rows, seed + slot)
        swa.store(k, v, cache, torch.full((rows,), slot, dtype=torch.int32), torch.arange(rows), spec=case.spec)
    return cache


def decode_inputs(case: Case, seed: int = 0) -> dict[str, Tensor | None]:
    """A decode step at the window's corners: first token, window just full, ring wrapped, far out, one padded row."""
    w, r = case.spec.window, case.spec.rows
    starts = [0, max(w - 2, 0), r + 3, 0, 10 * r + 7]
    state_ids, positions = steps(case, starts, [2, 0, 3, -1, 1])
    k, v, q = vectors(case, len(state_ids), seed)
    g = torch.Generator().manual_seed(seed + 99)
    return {
        "k": k,
        "v": v,
        "q": q,
        "cache": filled_cache(case),
        "state_ids": state_ids,
        "positions": positions,
        "valid_start": (positions - w // 3).clamp(min=0).int() if case.valid_start else None,
        "sinks": torch.randn(case.heads, generator=g) if case.sinks else None,
    }


def store_op(case: Case):  # noqa: ANN201  a closure over the geometry
    def fn(k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor) -> None:
        swa.store(k, v, cache, state_ids, positions, spec=case.spec)

    return fn


def attention_op(case: Case, return_lse: bool = True, tokens_per_step: int | None = None):  # noqa: ANN201
    def fn(
        q: Tensor, cache: Tensor, state_ids: Tensor, positions: Tensor, valid_start: Tensor | None, sinks: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return swa.attention(
            q,
            cache,
            state_ids,
            positions,
            spec=case.spec,
            valid_start=valid_start,
            sinks=sinks,
            softcap=case.softcap,
            tokens_per_step=case.spec.tokens_per_step if tokens_per_step is None else tokens_per_step,
            return_lse=return_lse,
        )

    return fn


STORE_ARGS = ("k", "v", "cache", "state_ids", "positions")
ATTENTION_ARGS = ("q", "cache", "state_ids", "positions", "valid_start", "sinks")
