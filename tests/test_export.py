"""torch.export and AOTInductor: a decode step as a package that a process without swa_inductor runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import ATTENTION_ARGS, BY_NAME, PREFILL_ARGS, Case, attention_op, decode_inputs, prefill_inputs, prefill_op
from numerics import assert_same, relative_error
from test_contract import op_calls
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import swa_inductor as swa
from swa_inductor.meta._library import OPS
from swa_inductor.models import deepseek_v4 as ds
from swa_inductor.testing import codegen, fake_gpu
from swa_inductor.testing._fake_inputs import FakeInputs

STEP, SLOTS = 2, 3
"""Tokens of a sequence in a step, state slots."""

RUN = """
import sys, torch
package, data = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
x = torch.load(data)
model.load_constants({"gqa.cache": x["gqa_ring"]}, check_full_update=False, user_managed=True)
with torch.no_grad():
    out = [[t.cpu() for t in model(*step, x["ring"])] for step in x["steps"]]
assert not any(name.partition(".")[0] == "swa_inductor" for name in sys.modules)
torch.save({"out": out, "ring": x["ring"].cpu(), "gqa_ring": x["gqa_ring"].cpu()}, data)
"""
"""What the fresh process does: every step, over rings that it owns: one is an argument, the other a buffer."""


class Grouped(torch.nn.Module):
    """Attention of GQA with a ring as buffer, K and V apart, raw values."""

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = swa.RingSpec(9, STEP, 64, num_kv_heads=2, kv_format="bf16" if dtype == torch.bfloat16 else "fp32")
        self.heads = [heads, 2, 2]
        self.qkv = torch.nn.Linear(hidden, sum(self.heads) * 64, dtype=dtype)
        self.sinks = torch.nn.Parameter(torch.randn(heads))
        self.register_buffer("cache", torch.zeros(self.spec.cache_shape(SLOTS), dtype=torch.uint8))

    def forward(self, x: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 64)).split(self.heads, 1)
        where = (self.cache, state_ids, positions)
        swa.store(k, v, *where, spec=self.spec)
        out = swa.attention(q, *where, spec=self.spec, sinks=self.sinks, tokens_per_step=STEP)
        assert isinstance(out, Tensor)
        return out.flatten(1)


class Step(torch.nn.Module):
    """A decode step of a V4 layer, which takes its ring as an argument, and of a GQA layer, which has its own."""

    def __init__(self, dtype: torch.dtype, heads: int = 4) -> None:
        super().__init__()
        self.config = ds.SlidingLayerConfig(
            48, heads, 40, o_groups=2, o_lora_rank=24, head_dim=64, rope_dim=32, window=37, tokens_per_step=STEP
        )
        torch.manual_seed(0)
        self.v4 = ds.SlidingAttention(self.config, ds.rope_table(self.config, 512), dtype=dtype)
        self.gqa = Grouped(48, heads, dtype)
        # Whole numbers: sums are the same in any order, so that bytes behind a norm can be compared.
        self.v4.qkv_a.weight.data = torch.randint(-1, 2, self.v4.qkv_a.weight.shape).to(dtype)
        self.requires_grad_(False)

    def forward(self, x: Tensor, state_ids: Tensor, positions: Tensor, ring: Tensor) -> tuple[Tensor, Tensor]:
        return self.v4(x, state_ids, positions, cache=ring), self.gqa(x, state_ids, positions)

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> dict:
        """20 steps of two or three sequences, one of them padding at times, and two rings."""
        g = torch.Generator().manual_seed(1)
        lengths, steps = torch.tensor([30, 0, 211]), []
        for i in range(20):
            slots = torch.randperm(SLOTS, generator=g)[: 2 + i % 2]
            ids = torch.where(torch.arange(len(slots)) == i % 5, -1, slots).int().repeat_interleave(STEP)
            at = torch.where(ids < 0, -1, (lengths[slots][:, None] + torch.arange(STEP)).flatten())
            lengths[slots] += 1
            x = torch.randint(-3, 4, (len(ids), 48), generator=g).to(dtype)
            steps.append([t.to(device) for t in (x, ids, at)])
        shapes = {"ring": self.config.ring.cache_shape(SLOTS), "gqa_ring": self.gqa.spec.cache_shape(SLOTS)}
        rings = {name: torch.randint(60, shape, generator=g).byte().to(device) for name, shape in shapes.items()}
        return {"steps": steps, **rings}


def run_in_a_fresh_process(model: Step, x: dict, folder: Path) -> dict:
    """Compile, package, load and run the steps of `x`: outputs and rings."""
    # -O0 is for the code that calls the kernels, which takes the compiler most of the time otherwise.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    tokens = STEP * torch.export.Dim("sequences", min=2, max=1024)
    shapes = (*({0: tokens},) * 3, None)
    program = torch.export.export(model, (*x["steps"][1], x["ring"]), dynamic_shapes=shapes)
    assert torch.ops.swa_inductor.attention.default in {node.target for node in program.graph.nodes}
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "step.pt2"), inductor_configs=options
    )
    torch.save(x, folder / "data.pt")
    subprocess.run([sys.executable, "-c", RUN, package, str(folder / "data.pt")], check=True, cwd=folder)
    return torch.load(folder / "data.pt")


def test_a_package_decodes_without_swa_inductor(tmp_path: Path) -> None:
    """C15: 20 steps: rings equal to the bit, outputs up to the order of sums."""
    model = Step(torch.float32).eval()
    x = model.inputs(torch.float32)
    got = run_in_a_fresh_process(model, x, tmp_path)
    model.gqa.cache.copy_(x["gqa_ring"])
    before = x["ring"].clone()
    for step, outputs in zip(x["steps"], got["out"], strict=True):
        for out, want in zip(outputs, model(*step, x["ring"]), strict=True):
            assert out.shape == want.shape and relative_error(out, want) < 1e-5
            assert not out[step[1] < 0].any()
    assert not torch.equal(x["ring"], before) and not torch.equal(model.gqa.cache, x["gqa_ring"])
    assert_same(got["ring"], x["ring"])
    assert_same(got["gqa_ring"], model.gqa.cache)


@pytest.mark.gpu
def test_a_package_for_a_gpu_decodes_without_swa_inductor(tmp_path: Path) -> None:
    """C15 on the device, against compiled code: sums in the same order, apart from those of the products."""
    model = Step(torch.bfloat16).eval().cuda()
    x = model.inputs(torch.bfloat16, "cuda")
    got = run_in_a_fresh_process(model, x, tmp_path)
    model.gqa.cache.copy_(x["gqa_ring"])
    before = x["ring"].clone()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for step, outputs in zip(x["steps"], got["out"], strict=True):
        for out, want in zip(outputs, compiled(*step, x["ring"]), strict=True):
            assert relative_error(out, want.cpu()) < 1e-2
    assert not torch.equal(x["ring"], before) and not torch.equal(model.gqa.cache, x["gqa_ring"])
    assert (
        got["ring"] != x["ring"].cpu()
    ).float().mean() < 1e-3  # a tie that GEMMs of other shapes may round otherwise
    assert (got["gqa_ring"] != model.gqa.cache.cpu()).float().mean() < 1e-3


class Captured(BaseException):
    """The C++ that a package would be compiled from; ends its making."""


def test_a_package_for_a_gpu_holds_the_templates() -> None:
    """C15, E13: without a GPU up to the C++ source: ops are launches of their kernels, nothing is called by name."""

    def capture(wrapper: PythonWrapperCodegen) -> None:
        raise Captured(wrapper.wrapper_call.getvalue())  # type: ignore[attr-defined]

    with fake_gpu((9, 0)), mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", capture):
        fakes = FakeInputs()
        fakes.mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), export=True, allow_non_fake_inputs=True)
        model = Step(torch.bfloat16, heads=16)
        x = model.inputs(torch.bfloat16)
        example = fakes.value((*x["steps"][1], x["ring"]), ())
        with tracing(TracingContext(fakes.mode)):
            program = torch.export.export(fakes.module(model), example)
        options = {name: value for name, value in codegen._CONFIG.items() if name in inductor_config._config}
        with pytest.raises(Captured) as captured, inductor_config.patch(options):
            torch._inductor.aoti_compile_and_package(program)
    code = str(captured.value)
    launches = [line for line in code.splitlines() if "call_triton_tem_" in line]
    assert [sum(name in line for line in launches) for name in ("_norm_store_", "_store_", "_attention_")] == [1, 2, 2]
    assert "swa_inductor::" not in code.replace("swa_inductor.", "") and "proxy_executor" not in code


# ---------------------------------------------------------------------------------------------------- plain IR


@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("gpt-oss", "mimo", "fp32-mxfp8")], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["attention", "attention_prefill", "attention_workspace", "attention_index"])
def test_what_a_package_for_the_cpu_computes(name: str, case: Case) -> None:
    """Ops without C++ of their own: their eager code, traced without a value read."""
    fn, args = op_calls(case)[name]
    if name == "attention":
        x = decode_inputs(case)
        fn, args = attention_op(case), [x[n] for n in ATTENTION_ARGS]
    if name == "attention_prefill":
        x = prefill_inputs(case)
        fn, args = prefill_op(case), [x[n] for n in PREFILL_ARGS]
    present = [i for i, arg in enumerate(args) if arg is not None]
    tensors = [args[i] for i in present]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(torch.ops.swa_inductor, name, OPS[name]):
            return fn(*(tensors[present.index(i)] if i in present else None for i in range(len(args))))

    graph = make_fx(call, tracing_mode="fake")(*tensors)
    assert not [node for node in graph.graph.nodes if "swa_inductor" in str(node.target)]
    for out, want in zip(graph(*tensors), fn(*args), strict=True):
        torch.testing.assert_close(out, want)
