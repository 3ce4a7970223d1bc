"""gather: W = 128 history rows per sequence, 528-byte mxfp8 records to bf16; beside copies that move as many bytes.

One copy is a compiled pointwise kernel, the faster one on an H200, the other `copy_`, both measured in the same run.

python -m benchmarks.gather [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor import reference

SPEC = swa.RingSpec(128, 6, 512, shared_kv=True)


def fn(cache: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return swa.gather(cache, ids, starts, spec=SPEC, dtype=torch.bfloat16)[0]


def run() -> list[dict[str, Any]]:
    rows = []
    for batch in (32, 128, 256, 512):
        moved = batch * SPEC.window * (SPEC.record_bytes + 2 * SPEC.head_dim)
        sets = _measure.copies(moved)
        cache = _measure.random_cache(SPEC, batch * sets)
        slots = torch.randperm(batch * sets, device="cuda").int().chunk(sets)
        starts = [torch.randint(SPEC.window, 10_000, (batch,), device="cuda") for _ in range(sets)]
        inputs = [(cache, *pair) for pair in zip(slots, starts, strict=True)]
        step = _measure.compiled(fn)
        for args in inputs[:2]:
            want, _ = reference.gather(*args, None, None, None, 128, "mxfp8", 512, None, torch.bfloat16)
            if not torch.equal(step(*args), want):
                raise SystemExit(f"gather of {batch} sequences is not what the reference reads")
        us = _measure.microseconds(step, inputs)
        row = {"sequences": batch, "us": us, "MB moved": moved / 1e6, "GB/s": moved / us / 1e3}
        for how in ("pointwise", "copy_"):
            copy = _measure.copy_us(moved, how)
            row |= {f"{how} us": copy, f"% of {how}": 100 * copy / us}
        rows.append(row)
    return rows


if __name__ == "__main__":
    _measure.report("gather", run)
