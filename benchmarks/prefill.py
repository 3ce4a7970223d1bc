"""Prefill of four sequences with history, H = 64, head_dim 512, K = V in mxfp8, W = 128.

attention_prefill (ring and new tokens), gather + attention_workspace, and FlexAttention, which is handed history and
new tokens as one bf16 tensor per sequence, so its time holds no gather and no dequantisation. The floor is a pointwise
copy of as many bytes as q, out, the new K = V and the history's records.

    python -m benchmarks.prefill [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor import records, reference

SPEC = swa.RingSpec(128, 6, 512, shared_kv=True)
BATCH, HEADS, SCALE = 4, 64, 512**-0.5
FLEX_OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
)


def prefill(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, *meta: torch.Tensor) -> torch.Tensor:
    ids, at, q_starts = meta[:3]
    return swa.attention_prefill(q, k, None, cache, ids, at, q_starts, spec=SPEC)


def workspace(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, *meta: torch.Tensor) -> torch.Tensor:
    _, _, _, slots, starts, pivots = meta
    rows, _ = swa.gather(cache, slots, starts, spec=SPEC, dtype=q.dtype, k=k)
    return swa.attention_workspace(q, rows, None, pivots, window=SPEC.window)


def inputs_of(tokens: int, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, cache, state_ids, positions, q_starts; slots, starts of the sequences; pivots."""
    own = tokens // BATCH
    starts = torch.randint(SPEC.window, 10_000, (BATCH,), device="cuda")
    at, seq = _measure.sequences(starts, own)
    q = torch.randn(tokens, HEADS, 512, device="cuda", dtype=torch.bfloat16)
    k = records.round_trip(torch.randn(tokens, 1, 512, device="cuda", dtype=torch.bfloat16), "mxfp8", SPEC.min_amax)
    lens = torch.full((BATCH,), own, device="cuda", dtype=torch.int32)
    plan = swa.prefill_plan(slots, lens, starts.int() + lens, spec=SPEC, num_slots=len(cache), num_tokens=tokens)
    return q, k, cache, slots[seq], at, starts[seq], slots, starts, plan[1]


def flex_inputs(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, *meta: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q [B, H, T / B, D] as a view, and K = V [B, 1, W + T / B, D]."""
    _, _, _, slots, starts, _ = meta
    history, _ = swa.gather(cache, slots, starts, spec=SPEC, dtype=q.dtype)
    kv = torch.cat([history.view(BATCH, SPEC.window, 512), k.view(BATCH, -1, 512)], 1)
    return q.view(BATCH, -1, HEADS, 512).transpose(1, 2), kv[:, None]


def flex(mask: Any, options: dict[str, int]) -> Callable[..., torch.Tensor]:
    def fn(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, kv, kv, block_mask=mask, scale=SCALE, enable_gqa=True, kernel_options=options)

    return fn


def best_flex(want: torch.Tensor, inputs: list[tuple[torch.Tensor, ...]]) -> tuple[float | None, str]:
    """Time of FlexAttention with the best of the kernel options that compile, and those options."""
    w, own = SPEC.window, inputs[0][0].shape[2]
    mask = create_block_mask(
        lambda b, h, i, j: (j <= i + w) & (j > i), None, None, own, own + w, device="cuda"
    )  # key j is at position j - W of the chunk
    best: tuple[float | None, str] = (None, "none compiles")
    for options in FLEX_OPTIONS:
        try:
            step = _measure.compiled(flex(mask, options))
            got = step(*inputs[0])
        except Exception as error:  # a tile that does not fit; the next one may
            print(f"FlexAttention {options}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            continue
        _measure.require_close("FlexAttention", got.transpose(1, 2).reshape(want.shape), want, 5e-3)
        us = _measure.microseconds(step, inputs)
        if best[0] is None or us < best[0]:
            best = us, str(options or "default")
    return best


def measure(tokens: int) -> dict[str, Any]:
    sets = 2  # 134 MB of queries at 2,048 tokens
    cache = _measure.random_cache(SPEC, BATCH * sets)
    slots = torch.randperm(BATCH * sets, device="cuda").int().chunk(sets)
    inputs = [inputs_of(tokens, cache, s) for s in slots]
    q, k, _, ids, at, q_starts, *_ = inputs[0]
    want, _ = reference.attention_prefill(
        q, k, None, cache, ids, at, q_starts, None, None, SPEC.window, SCALE, SPEC.kv_format, None
    )
    moved = _measure.bytes_of(q, q, k) + BATCH * SPEC.window * SPEC.record_bytes
    row: dict[str, Any] = {"tokens": tokens, "floor": _measure.copy_us(moved)}
    paths: dict[str, Callable[..., torch.Tensor]] = {
        "attention_prefill": prefill,
        "gather + attention_workspace": workspace,
    }
    for name, fn in paths.items():
        step = _measure.compiled(fn)
        _measure.require_close(name, step(*inputs[0]), want, 5e-3)
        row[name] = _measure.microseconds(step, inputs)
    row["FlexAttention"], row["its options"] = best_flex(want, [flex_inputs(*x) for x in inputs])
    return row | {"MB moved": moved / 1e6}


def run() -> list[dict[str, Any]]:
    return [measure(tokens) for tokens in (2048, 8192)]


if __name__ == "__main__":
    _measure.report("prefill", run)
