"""attention in a decode step, read from the rings; against a copy of q to out, which no attention can undercut by much.

python -m benchmarks.decode [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor import reference


@dataclass(frozen=True)
class Model:
    """Attention shape of a model's sliding layers."""

    name: str
    spec: swa.RingSpec
    heads: int
    sinks: bool


V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
MODELS = (
    Model("V4, 64 heads", V4, 64, True),
    Model("V4, 128 heads", V4, 128, True),
    Model("gpt-oss", swa.RingSpec(128, 1, 64, num_kv_heads=8, kv_format="bf16"), 64, True),
    Model("Gemma 3 4B", swa.RingSpec(1024, 1, 256, num_kv_heads=4, kv_format="bf16"), 8, False),
)
BATCHES = (1, 8, 64, 256)


def measure(model: Model, batch: int) -> dict[str, Any]:
    spec, d = model.spec, model.spec.tokens_per_step
    q_bytes = batch * d * model.heads * spec.head_dim * 2
    ring_bytes = batch * (spec.window + d - 1) * spec.num_kv_heads * spec.record_bytes
    sets = _measure.copies(2 * q_bytes + ring_bytes)
    cache = _measure.random_cache(spec, batch * sets)
    slots = torch.randperm(batch * sets, device="cuda").int().chunk(sets)
    sinks = torch.randn(model.heads, device="cuda") if model.sinks else None

    def fn(q: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return swa.attention(q, cache, ids, at, spec=spec, sinks=sinks, tokens_per_step=d)

    inputs = []
    for ids in slots:
        at, _ = _measure.sequences(torch.randint(spec.rows, 10_000, (batch,), device="cuda"), d)
        q = torch.randn(batch * d, model.heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
        inputs.append((q, ids.repeat_interleave(d), at))
    step = _measure.compiled(fn)
    for q, ids, at in inputs[:2]:
        got, some = step(q, ids, at), slice(-64, None)
        want, _ = reference.attention(
            q[some],
            cache,
            ids[some],
            at[some],
            None,
            sinks,
            spec.window,
            spec.head_dim**-0.5,
            spec.kv_format,
            spec.v_head_dim,
            None,
            torch.float64,
        )
        _measure.require_close(f"attention, {model.name}, {batch} sequences", got[some], want, 5e-3)
    us = _measure.microseconds(step, inputs)
    return {
        "model": model.name,
        "sequences": batch,
        "tokens": batch * d,
        "us": us,
        "copy q to out": _measure.microseconds(lambda q, ids, at: q.clone(), inputs),
        "MB moved": (2 * q_bytes + ring_bytes) / 1e6,
        "GB/s": (2 * q_bytes + ring_bytes) / us / 1e3,
    }


def run() -> list[dict[str, Any]]:
    return [measure(model, batch) for model in MODELS for batch in BATCHES]


if __name__ == "__main__":
    _measure.report("decode", run)
