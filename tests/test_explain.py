"""swa_inductor.explain: launches in order, what is in them, refused fusions, advice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import swa_inductor as swa
from swa_inductor.explanation import Explanation
from swa_inductor.models import deepseek_v4 as ds

SPEC = swa.RingSpec(128, 1, 64, num_kv_heads=2, kv_format="bf16")
HEADS = 8
T = 3


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    """bf16 tensors of these shapes, a cache, state ids and positions."""
    values = [torch.randn(shape).bfloat16() for shape in shapes]
    return [*values, torch.zeros(SPEC.cache_shape(4), dtype=torch.uint8), torch.arange(T).int(), torch.arange(T)]


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def by_halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


def by_pairs(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle[..., ::2].cos(), angle[..., ::2].sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def kinds(explanation: Explanation) -> list[tuple[str, str | None]]:
    return [(kernel.kind, kernel.op) for kernel in explanation.kernels]


def test_kernels_in_order_and_a_fused_epilogue() -> None:
    def step(x: Tensor, w: Tensor, gate: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (-1, 64)).split([HEADS, 2, 2], 1)
        swa.store(k, v, cache, ids, at, spec=SPEC)
        return (swa.attention(q, cache, ids, at, spec=SPEC) * gate.sigmoid()).flatten(1) @ w[:512, :256]

    x = inputs((T, 768), (768, 768), (T, HEADS, 64))
    before = x[3].clone()
    found = swa.explain(step, *x)
    assert kinds(found) == [
        ("extern", "aten.mm"),
        ("template", "swa_inductor.store"),
        ("template", "swa_inductor.attention"),
        ("extern", "aten.mm"),
    ]
    gemm, store, attention, _ = found.kernels
    assert (gemm.name, gemm.functions, store.contains) == ("extern_kernels.mm", ("step",), ())
    assert set(attention.contains) >= {"aten.sigmoid", "aten.mul"} and attention.functions == ("step",)
    assert "aten.mm" not in attention.contains  # provenance comments name whatever stands in front
    assert not found.advice
    assert torch.equal(x[3], before)  # nothing ran


def test_a_refused_fusion_has_its_reason() -> None:
    def step(q: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        return swa.attention(q, cache, ids, at, spec=SPEC).float().sum(-1)

    found = swa.explain(step, *inputs((T, HEADS, 64)))
    assert [k.kind for k in found.kernels] == ["template", "triton"]
    assert "aten.sum" in found.kernels[1].contains and found.kernels[1].op is None
    (refusal,) = found.refused
    assert (refusal.producer, refusal.consumer) == (0, 1) and refusal.reason.strip()


def test_fusions_that_happened_or_have_no_part_in_our_kernels_are_not_refused() -> None:
    def step(q: Tensor, x: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1).cumsum(0)
        return swa.attention(q * 2, cache, ids, at, spec=SPEC) + 1, y / y.amax()

    found = swa.explain(step, *inputs((T, HEADS, 64), (64, 128)))
    ours = [i for i, k in enumerate(found.kernels) if k.op == "swa_inductor.attention"]
    assert len(ours) == 1 and found.kernels[ours[0]].contains == ("aten.mul", "aten.add")
    assert len(found.kernels) >= 3 and not found.refused


@pytest.mark.parametrize("rope", [by_halves, by_pairs])
def test_advice_on_plain_norm_and_rope(rope) -> None:  # noqa: ANN001
    def step(x: Tensor, w: Tensor, angle: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        q, k, v = (x @ w).unflatten(-1, (-1, 64)).split([HEADS, 2, 2], 1)
        swa.store(rope(rms_norm(k), angle), v, cache, ids, at, spec=SPEC)
        return rope(swa.attention(rope(rms_norm(q), angle), cache, ids, at, spec=SPEC), -angle)

    advice = swa.explain(step, *inputs((T, 768), (768, 768), (T, 1, 64))).advice
    wanted = [
        ("norm of k in kernel", "pass norm_eps (and norm_weight) to store"),
        ("norm of q in kernel", "pass q_norm_eps (and q_norm_weight) to attention"),
        ("RoPE of q in kernel", "pass rope (a table) to attention"),
        ("RoPE of the output in kernel", "pass rope and inverse_rope=True to attention"),
    ]
    for start, end in wanted:
        assert any(line.startswith(start) and line.endswith(end) for line in advice), advice
    assert not any("norm_store" in line for line in advice)  # the norm beside k is that of q


def test_no_advice_on_other_code() -> None:
    """Norms of the hidden state and a gated sum are nothing that the ops could do."""

    def step(x: Tensor, w: Tensor, gate: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        q, k, v = (rms_norm(x) @ w).unflatten(-1, (-1, 64)).split([HEADS, 2, 2], 1)
        swa.store(k, v, cache, ids, at, spec=SPEC)
        out = swa.attention(q, cache, ids, at, spec=SPEC)
        return out * gate.sigmoid() + q * gate.tanh()

    assert not swa.explain(step, *inputs((T, 768), (768, 768), (T, HEADS, 64))).advice


def layer(config: ds.SlidingLayerConfig) -> tuple[ds.SlidingAttention, list[Tensor]]:
    with torch.device("meta"):
        cache = torch.empty(config.ring.cache_shape(8), dtype=torch.uint8)
        module = ds.SlidingAttention(config, torch.empty(4096, config.rope_dim), cache, device="meta")
    rows = 8 * config.tokens_per_step
    x = torch.empty(rows, config.hidden_size, dtype=torch.bfloat16, device="meta")
    return module, [x, torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int64)]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_a_whole_layer_is_told_by_its_gemms_and_ops(capability: tuple[int, int]) -> None:
    module, args = layer(replace(ds.V4_FLASH, tokens_per_step=6))
    found = swa.explain(module, *args, capability=capability)
    ops = [op for _, op in kinds(found) if op is not None]
    assert [op for op in ops if not op.startswith("swa_")] == ["aten.mm", "aten.mm", "aten.bmm", "aten.mm"]
    assert [op.split(".")[0] for op in ops] == ["aten", "swa_inductor", "aten", "swa_inductor", "aten", "aten"]
    assert len(str(found).splitlines()) > len(found.kernels)


def test_a_norm_beside_k_is_for_norm_store() -> None:
    def step(x: Tensor, w: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        a, k = (x @ w).split([96, 256], -1)
        k, v = k.unflatten(-1, (4, 64)).split(2, 1)
        swa.store(k, v, cache, ids, at, spec=SPEC)
        return rms_norm(a) @ w[:96]

    (advice,) = swa.explain(step, *inputs((T, 256), (256, 352))).advice
    assert "use norm_store instead of store" in advice


def test_mode_and_other_options_of_code_generation() -> None:
    def step(q: Tensor, cache: Tensor, ids: Tensor, at: Tensor) -> Tensor:
        return swa.attention(q, cache, ids, at, spec=SPEC)

    x = inputs((T, HEADS, 64))
    found = swa.explain(
        step, *x[:1], mode="max-autotune-no-cudagraphs", kwargs=dict(zip(("cache", "ids", "at"), x[1:], strict=True))
    )
    assert kinds(found) == [("template", "swa_inductor.attention")]
    with pytest.raises(ValueError, match="no card of compute capability"):
        swa.explain(step, *x, capability=(1, 0))


def test_the_table() -> None:
    table = str(
        Explanation(
            kernels=(swa.explanation.Kernel("triton_poi_0", "triton", None, ("aten.mul", "aten.add"), ("scale",)),),
            refused=(swa.explanation.Refusal(0, 1, "no shared data"),),
            advice=("do less",),
        )
    )
    assert table == (
        "   kind    computes  contains\n"
        "0  triton  scale     mul, add\n"
        "\n"
        "fusions that Inductor refused\n"
        "0 and 1: no shared data\n"
        "\n"
        "advice\n"
        "do less"
    )


def test_importing_the_package_imports_nothing_for_it() -> None:
    code = (
        "import sys, swa_inductor; assert not {'swa_inductor.testing', 'swa_inductor.explanation'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert callable(swa_inductor.explain)"], check=True)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        swa.nothing_of_the_kind  # noqa: B018
