"""Kernels on every architecture, by ptxas: nothing is dropped, nothing is too large, and little or nothing spills.

benchmarks/portability.py compiles the whole table, all shapes on all architectures; results/portability.json holds what
came of it. Here each shape meets each op once, on one architecture after the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import ATTENTION_ARGS, Case, attention_op, decode_inputs

import swa_inductor as swa
from benchmarks import portability
from benchmarks.portability import ARCHS, TABLE, within
from swa_inductor.testing import resource_usage
from swa_inductor.testing.fake_gpu import card_of

RECORDED = {
    (row["arch"], row["shape"], row["op"]): row
    for row in json.loads((Path(portability.__file__).parent / "results" / "portability.json").read_text())["rows"]
}
PAIRS = [(shape, op) for shape, calls in TABLE.items() for op in calls()]
HERE = [(list(ARCHS)[(i + i // 9) % len(ARCHS)], shape, op) for i, (shape, op) in enumerate(PAIRS)]


def test_the_record() -> None:
    """E3: all kernels compile, fit (99 KB on sm_86, sm_89 and sm_120) and keep to their limits, whatever the card."""
    assert set(RECORDED) == {(arch, shape, op) for arch in ARCHS for shape, op in PAIRS}
    for (arch, _, op), row in RECORDED.items():
        assert "error" not in row and row["spills"] <= portability.LIMITS.get(op.split(",")[0], 0)
        assert row["shared_bytes"] <= card_of(ARCHS[arch]).shared_bytes
    assert {arch for arch, _, _ in HERE} == ARCHS.keys()


@pytest.mark.parametrize(("arch", "shape", "op"), HERE, ids=lambda v: v)
def test_usage(arch: str, shape: str, op: str, record_property) -> None:  # noqa: ANN001
    """The one configuration that is recorded, and no other."""
    u = portability.usage(TABLE[shape]()[op], arch)
    figures = f"{u.registers:>4} registers {u.spills:>3} spills {u.shared_bytes:>7} B"
    record_property("kernel", f"{arch:<6} {op:<19} {shape:<24} {u.num_warps} warps {u.num_stages} stages {figures}")
    row = RECORDED[arch, shape, op]
    assert within(op, arch, u) and (u.num_warps, u.num_stages) == (row["warps"], row["stages"])


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_usage_with_neighbours(capability: tuple[int, int]) -> None:
    """E2: q looked up in bf16 in front of attention, a cast to fp32 behind: one kernel where it fits, else two."""
    case = Case("512 K = V", swa.RingSpec(64, 6, 512, shared_kv=True), 64, sinks=True)
    x = decode_inputs(case)
    rows = torch.arange(len(x["q"])).flip(0)

    def fn(rows: torch.Tensor, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return attention_op(case, return_lse=False)(q[rows], *rest).float()

    *others, u = resource_usage(fn, rows, *(x[n] for n in ATTENTION_ARGS), capability=capability)
    # There the keys are split over programs, too: the first kernel clears their counters.
    alone = {"triton_poi_fused_attention_index_0", "triton_poi_fused_index_1"}
    assert {other.name for other in others} == (alone if capability == (8, 6) else set())
    assert u.name.startswith("triton_tem_fused__to_copy_attention")
    assert within("attention", f"sm_{capability[0]}{capability[1]}", u)
