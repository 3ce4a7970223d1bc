"""prepare_decode into persistent buffers, D = 6, W = 128, without and with an index; beside a kernel of one element.

python -m benchmarks.metadata [--json FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import swa_inductor as swa
from benchmarks import _measure

SPEC = swa.RingSpec(128, 6, 512, shared_kv=True)
SLOTS = 1024
CALLS = 128
"""Calls in a graph; their inputs and buffers stay in the L2 cache, as those of a decode loop do."""


def step(sequences: int, width: int | None) -> tuple[_measure.Inputs, swa.PreparedDecode]:
    """Inputs and buffers of a step; one sequence in eight is padded."""
    ids = torch.randperm(SLOTS, device="cuda")[:sequences].int()
    ids[7::8] = -1
    lengths = torch.randint(0, 100_000, (sequences,), device="cuda")
    accepted, drafts = (torch.randint(0, SPEC.tokens_per_step, (sequences,), device="cuda").int() for _ in range(2))
    start = torch.where(lengths % 3 == 0, lengths // 2, 0).int()
    out = swa.PreparedDecode.allocate(SPEC, sequences, width=width, device="cuda")
    return (lengths, accepted, ids, start, drafts), out


def prepare(inputs: _measure.Inputs, out: swa.PreparedDecode | None, width: int | None) -> swa.PreparedDecode:
    lengths, accepted, ids, start, drafts = inputs
    assert lengths is not None and accepted is not None and ids is not None
    return swa.prepare_decode(
        lengths,
        accepted,
        ids,
        spec=SPEC,
        num_slots=SLOTS,
        valid_start=start,
        draft_counts=drafts,
        width=width,
        out=out,
    )


def require_equal(got: swa.PreparedDecode, want: swa.PreparedDecode) -> None:
    for name, value in vars(want.metadata).items():
        if value is not None and not torch.equal(getattr(got.metadata, name), value):
            raise SystemExit(f"{name} is not what eager code gives")
    if not torch.equal(got.lengths, want.lengths) or got.errors.any():
        raise SystemExit("lengths or errors are not what eager code gives")


def one_element() -> float:
    def add(x: Tensor) -> None:
        x.add_(1)

    inputs = [(torch.zeros(1, dtype=torch.int32, device="cuda"),) for _ in range(CALLS)]
    return _measure.microseconds(_measure.compiled(add), inputs)


def run() -> list[dict[str, Any]]:
    least = one_element()
    rows = []
    for width in (None, 128):
        for sequences in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):

            def fn(inputs: _measure.Inputs, out: swa.PreparedDecode, width: int | None = width) -> None:
                prepare(inputs, out, width)

            steps = [step(sequences, width) for _ in range(CALLS)]
            compiled = _measure.compiled(fn)
            for inputs, out in steps[:2]:
                compiled(inputs, out)
                require_equal(out, prepare(inputs, None, width))
            us = _measure.microseconds(compiled, steps)  # type: ignore[arg-type]
            rows.append(
                {"sequences": sequences, "index": width, "us": us, "one element us": least, "ratio": us / least}
            )
    return rows


if __name__ == "__main__":
    _measure.report("metadata", run)
