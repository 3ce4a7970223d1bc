"""Every shipped launch configuration compiles for every architecture, within shared memory.

Stores and prepare_decode spill nothing, gather two words on sm_100, attention at most 16 words in some shapes;
attention_prefill, where it holds two loops over keys, up to 64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import (
    ATTENTION_ARGS,
    BF16,
    BY_NAME,
    EPS,
    FP32,
    GATHER_ARGS,
    NORM_STORE_ARGS,
    PREFILL_ARGS,
    STORE_ARGS,
    TURN_ARGS,
    Case,
    attention_op,
    cast_back_op,
    decode_inputs,
    gather_op,
    index_op,
    norm_inputs,
    norm_store_op,
    prefill_inputs,
    prefill_op,
    prepare_op,
    store_op,
    workspace_op,
)

import swa_inductor as swa
from swa_inductor.testing import resource_usage
from swa_inductor.testing.fake_gpu import card_of

MAY_SPILL = {"gather": 2, "attention": 16, "attention_workspace": 16, "attention_index": 16, "attention_prefill": 64}
"""Words of local memory per thread."""


def _case(name: str, heads: int, step: int, dim: int, dtype: torch.dtype = BF16, **kw: object) -> Case:
    return Case(name, swa.RingSpec(64, step, dim, **kw), heads, dtype, sinks=True)  # type: ignore[arg-type]


# One per configuration of lowerings.attention.config and lowerings.store.config: widths of K and V, rows of a program.
SHAPES = [
    _case("512 K=V, 6 x 64 heads", 64, 6, 512, shared_kv=True),
    _case("512 K=V, 16 rows", 16, 1, 512, shared_kv=True),
    _case("512 K and V", 16, 6, 512),
    _case("256, 4 rows", 4, 1, 256, kv_format="bf16"),
    _case("256, 24 rows", 4, 6, 256),
    _case("256, 96 rows", 16, 6, 256),
    _case("192 and 128", 64, 6, 192, v_head_dim=128, num_kv_heads=8),
    _case("96", 6, 2, 96, num_kv_heads=2),
    _case("64, 48 rows", 64, 6, 64, num_kv_heads=8, kv_format="bf16"),
    _case("fp32 512", 64, 6, 512, FP32, shared_kv=True),
    _case("fp32 64", 8, 1, 64, FP32, kv_format="fp32"),
]


every_capability = pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")


@every_capability
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_usage(case: Case, capability: tuple[int, int], record_property) -> None:  # noqa: ANN001
    x, y = decode_inputs(case), prefill_inputs(case, q_lens=(20, 3))
    workspace = (y["q"], y["k"], y["v"], torch.zeros(len(y["q"]), 4, dtype=torch.int32), y["sinks"])
    calls = {
        "store": (store_op(case), [x[n] for n in STORE_ARGS]),
        "store_cast_back": (cast_back_op(case), [x[n] for n in STORE_ARGS]),
        "attention": (attention_op(case), [x[n] for n in ATTENTION_ARGS]),
        "attention_prefill": (prefill_op(case), [y[n] for n in PREFILL_ARGS]),
        "attention_workspace": (workspace_op(case), workspace),
        "attention_index": (
            index_op(case),
            [x["q"], x["cache"], torch.zeros(len(x["q"]), 70, dtype=torch.int32), None],
        ),
        "gather": (gather_op(case), [y[n] for n in GATHER_ARGS]),
    }
    for kernel, (op, args) in calls.items():
        usages = resource_usage(op, *args, capability=capability)
        # one configuration, none dropped and none left to a benchmark
        (u,) = [u for u in usages if u.name.startswith("triton_tem")]
        note(kernel, case.name, u, capability, record_property)
        assert u.spills <= MAY_SPILL.get(kernel, 0) and u.shared_bytes <= card_of(capability).shared_bytes


FUSED = [
    *(BY_NAME[n] for n in ("v4+", "gemma3+", "gpt-oss+", "mimo+", "fp32+")),
    replace(BY_NAME["v4+"], name="v4+, 128 heads", heads=128),
    Case("halves of 256+", swa.RingSpec(64, 6, 256, shared_kv=True), 8, rope_dim=256, halves=True, inverse=True),
]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("case", FUSED, ids=lambda c: c.name)
def test_usage_with_norm_and_rope(case: Case, capability: tuple[int, int], record_property) -> None:  # noqa: ANN001
    """Also where the number of tokens is not known: 128 rows a program for 64 heads."""
    x, y = decode_inputs(case), prefill_inputs(case, q_lens=(20, 3))
    dynamic = [ATTENTION_ARGS.index(n) for n in ("q", "state_ids", "positions", "valid_start") if x[n] is not None]
    for kernel, op, args, options in (
        ("attention", attention_op(case), [x[n] for n in ATTENTION_ARGS], {}),
        ("attention", attention_op(case), [x[n] for n in ATTENTION_ARGS], {"dynamic_inputs": dynamic}),
        ("attention_prefill", prefill_op(case), [y[n] for n in PREFILL_ARGS], {}),
    ):
        usages = resource_usage(op, *args, capability=capability, **options)
        (u,) = [u for u in usages if u.name.startswith("triton_tem")]
        note(kernel, case.name, u, capability, record_property)
        assert u.spills <= MAY_SPILL[kernel] and u.shared_bytes <= card_of(capability).shared_bytes


def note(kernel: str, case: str, u, capability: tuple[int, int], record_property) -> None:  # noqa: ANN001
    """A line of the table that is printed behind the tests."""
    line = (
        f"sm_{capability[0]}{capability[1]:<3} {kernel:<18} {case:<24} {u.num_warps} warps "
        f"{u.num_stages} stages {u.registers:>4} registers {u.spills:>3} spills {u.shared_bytes:>7} B"
    )
    record_property("kernel", line)


@every_capability
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(
    ("case", "width"),
    [(SHAPES[0], 1280), (SHAPES[2], 7168), (SHAPES[4], 1536), (SHAPES[7], 40)],
    ids=lambda v: getattr(v, "name", v),
)
def test_usage_of_norm_and_rope(case, width, interleaved, capability, record_property) -> None:  # noqa: ANN001
    """The stores with norm and RoPE spill nothing either."""
    x = norm_inputs(case, decode_inputs(case), width)
    for kernel, op, names in (
        ("store, norm, RoPE", store_op, TURN_ARGS),
        ("store_cast_back", cast_back_op, TURN_ARGS),
        ("norm_store", norm_store_op, NORM_STORE_ARGS),
    ):
        (u,) = resource_usage(op(case, EPS, interleaved), *(x[n] for n in names), capability=capability)
        note(kernel, f"{case.name}, x {width}", u, capability, record_property)
        assert u.spills == 0 and u.shared_bytes <= card_of(capability).shared_bytes


@every_capability
@pytest.mark.parametrize("width", [None, 20, 128, 300])
def test_usage_of_prepare_decode(width: int | None, capability: tuple[int, int], record_property) -> None:  # noqa: ANN001
    """One per configuration of lowerings.prepare_decode.config."""
    spec = swa.RingSpec(20, 6, 64)
    one = torch.zeros(9, dtype=torch.int32)
    args = (one.long(), one, one, one, one)
    (u,) = resource_usage(prepare_op(spec, 4, width), *args, capability=capability)
    note("prepare_decode", f"index of {width}", u, capability, record_property)
    assert u.spills == 0 and u.shared_bytes <= card_of(capability).shared_bytes


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_usage_with_neighbours(capability: tuple[int, int]) -> None:
    """E2: q looked up in bf16 in front of attention, a cast to fp32 behind: one kernel where it fits, else two."""
    case = _case("512 K=V", 64, 6, 512, shared_kv=True)
    x = decode_inputs(case)
    rows = torch.arange(len(x["q"])).flip(0)

    def fn(rows: torch.Tensor, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return attention_op(case, return_lse=False)(q[rows], *rest).float()

    *others, u = resource_usage(fn, rows, *(x[n] for n in ATTENTION_ARGS), capability=capability)
    # There the keys are split over programs, too: the first kernel clears their counters.
    alone = {"triton_poi_fused_attention_index_0", "triton_poi_fused_index_1"}
    assert {other.name for other in others} == (alone if capability == (8, 6) else set())
    assert u.name.startswith("triton_tem_fused__to_copy_attention")
    assert u.spills <= MAY_SPILL["attention"] and u.shared_bytes <= card_of(capability).shared_bytes


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_small_shared_memory(heads: int, capability: tuple[int, int]) -> None:
    """E3: 99 KB do not hold a window of 512 values, nor do the kernels ask for that there."""
    case = _case("512 K=V", heads, 6, 512, shared_kv=True)
    x, y = decode_inputs(case), prefill_inputs(case, q_lens=(20, 3))
    for op, args in (
        (attention_op(case), [x[n] for n in ATTENTION_ARGS]),
        (prefill_op(case), [y[n] for n in PREFILL_ARGS]),
    ):
        (u,) = [u for u in resource_usage(op, *args, capability=capability) if u.name.startswith("triton_tem")]
        assert u.shared_bytes <= card_of(capability).shared_bytes <= 99 * 1024
