"""swa_inductor.testing: code generation without a GPU, ptxas figures, and the interpreter against eager."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm, realize_inputs

from swa_inductor.testing import WorkerError, generate_code, resource_usage, run_on_cpu

# An op as users write them out of tree: scores of queries against rows of bf16 that lie in a uint8 cache, plus the sum
# of the first `count` biases; every row read has its signs flipped in place.
TEMPLATE = r"""
{{def_kernel("Q", "CACHE", "BIAS", "COUNT")}}
    T = {{size("Q", 0)}}
    R = {{size("CACHE", 0)}}
    stride_row = {{stride("CACHE", 0)}}
    idx_t = tl.arange(0, BLOCK_T)[:, None]
    offs_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    idx_r = offs_r[None, :]
    rows = CACHE + offs_r.to(tl.int64) * stride_row
    rows_bf16 = rows.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rows_int16 = rows.to(tl.pointer_type(tl.int16), bitcast=True)
    row_ok = (offs_r < R)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)[None, :]
        q = tl.load(Q + idx_t * D + offs_d, mask=idx_t < T, other=0.0)
        keys = tl.load(rows_bf16[:, None] + offs_d, mask=row_ok, other=0.0)
        acc = tl.dot(q, tl.trans(keys), acc, input_precision="ieee")
        bits = tl.load(rows_int16[:, None] + offs_d, mask=row_ok, other=0)
        tl.debug_barrier()
        tl.store(rows_int16[:, None] + offs_d, bits ^ -32768, mask=row_ok)
    bias = 0.0
    count = tl.load(COUNT)
    for i in range(0, count):
        bias += tl.load(BIAS + i)
    scores = acc + bias
    mask = (idx_t < T) & (idx_r < R)
    {{store_output(("idx_t", "idx_r"), "scores", "mask", indent_width=4, val_shape=("BLOCK_T", "BLOCK_R"))}}
"""


def _scores(q: torch.Tensor, cache: torch.Tensor, bias: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    rows = cache[:, : 2 * q.shape[1]].view(torch.bfloat16)
    scores = q.float() @ rows.float().T + bias[: int(count)].sum()
    rows.neg_()
    return scores


@pytest.fixture(scope="module")
def scores_op():
    library = torch.library.Library("swa_testing_fixture", "DEF")
    library.define("scores(Tensor q, Tensor(a!) cache, Tensor bias, Tensor count) -> Tensor")
    library.impl("scores", _scores, "CompositeExplicitAutograd")
    fake = lambda q, cache, bias, count: q.new_empty(q.shape[0], cache.shape[0], dtype=torch.float32)  # noqa: E731
    torch.library.register_fake("swa_testing_fixture::scores", fake, lib=library)
    op = torch.ops.swa_testing_fixture.scores.default

    @SymbolicGridFn
    def grid(t, r, meta, *, cdiv):
        return (cdiv(r, meta["BLOCK_R"]), 1, 1)

    template = TritonTemplate("swa_testing_fixture_scores", grid, TEMPLATE)

    @register_lowering(op, type_promotion_kind=None)
    def lower(q, cache, bias, count):
        inputs = list(realize_inputs(q, cache, bias, count))
        size = [q.get_size()[0], cache.get_size()[0]]
        layout = ir.FixedLayout(q.get_device(), torch.float32, size)
        choices: list = []
        blocks = dict(D=int(q.get_size()[1]), BLOCK_T=16, BLOCK_R=16, BLOCK_D=32, num_warps=4, num_stages=2)
        error = template.maybe_append_choice(
            choices, input_nodes=inputs, layout=layout, mutated_inputs=inputs[1:2], **blocks
        )
        if error is not None:
            raise error
        out = autotune_select_algorithm("swa_testing_fixture_scores", choices, inputs, layout)
        return out[0] if isinstance(out, tuple) else out

    yield op
    lowerings.pop(op)
    library._destroy()


def _scores_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 64, generator=generator).bfloat16()
    cache = torch.randint(0, 256, (40, 144), dtype=torch.uint8, generator=generator)
    cache[:, :128] = torch.randn(40, 64, generator=generator).bfloat16().view(torch.uint8)
    return q, cache, torch.arange(8.0), torch.tensor(3, dtype=torch.int32)


def normalise(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = torch.tanh(y) * x
    return scaled.sum(-1), torch.nn.functional.rms_norm(scaled, (x.shape[-1],)).bfloat16()


def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x)
    return x.amax(-1)


def test_pointwise_and_reduction_are_one_kernel():
    code = generate_code(normalise, torch.randn(8, 64), torch.randn(8, 64))
    assert len(code.kernels) == len(code.launches) == code.count("triton_") == 1
    assert code.count("no_such_kernel") == 0
    assert "libdevice.tanh" in code.kernel_source(code.kernels[0])
    assert "libdevice.tanh" not in code.call and ".run(" in code.call
    assert sorted(code.allocations) == [((8,), (1,), "torch.float32"), ((8, 64), (64, 1), "torch.bfloat16")]
    with pytest.raises(KeyError, match="no kernel 'other'"):
        code.kernel_source("other")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_code_is_for_the_capability(capability):
    code = generate_code(torch.relu, torch.randn(64), capability=capability)
    assert f"cc={10 * capability[0] + capability[1]}" in code.source


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="no card of compute capability"):
        generate_code(torch.relu, torch.randn(64), capability=(1, 0))
    with pytest.raises(ValueError, match="cpp_wrapper"):
        generate_code(torch.relu, torch.randn(8), options={"cpp_wrapper": True})


def test_mutated_input_is_not_copied():
    code = generate_code(accumulate, torch.zeros(1000, 64), torch.randn(1000, 64), static_inputs=(0,))
    assert [allocation.size for allocation in code.allocations] == [(1000,)]


def test_partitioned_graph_has_its_launches():
    code = generate_code(accumulate, torch.zeros(8, 64), torch.randn(8, 64), mode="reduce-overhead")
    assert len(code.launches) == 1 and len(code.allocations) == 1


def test_exactly_one_graph():
    def two(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(ValueError, match="2 graphs"):
        generate_code(two, torch.randn(8), fullgraph=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        generate_code(two, torch.randn(8))
    with pytest.raises(ValueError, match="0 graphs"):
        generate_code(lambda: 1)
    assert generate_code(torch.relu, torch.randn(8), fullgraph=False).count("relu") == 1


def test_autotuning_takes_the_first_choice():
    x = torch.randn(64, 64).bfloat16()
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    code = generate_code(lambda x: torch.relu(x @ x), x, options=options)
    assert code.launches == code.kernels and code.count("mm") == 1
    (out,) = run_on_cpu(code, (x,))
    torch.testing.assert_close(out, torch.relu(x @ x))


def test_errors_of_the_function_come_through():
    def wrong(x):
        return torch.ops.aten.mm(x, x)

    with pytest.raises(Exception, match="mat1 and mat2 shapes cannot be multiplied|must have same reduction dim"):
        generate_code(wrong, torch.randn(3, 4))


def test_leaves_no_trace():
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "get_device_properties")}
    first = generate_code(normalise, torch.randn(8, 64), torch.randn(8, 64))
    with pytest.raises(ValueError):
        generate_code(lambda: 1)
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    for compiled, eager in zip(torch.compile(normalise)(x, y), normalise(x, y), strict=True):  # C++ on the CPU
        torch.testing.assert_close(compiled, eager)
    assert generate_code(normalise, torch.randn(8, 64), torch.randn(8, 64)).call == first.call


def test_runs_with_arguments_in_the_order_of_the_function():
    def in_other_order(unused, y, x, *, scale):
        return x / scale - y

    y, x = torch.randn(8, 64), torch.randn(8, 64)
    scale = torch.rand(64) + 1
    code = generate_code(in_other_order, 3, y, x, kwargs={"scale": scale})
    (out,) = run_on_cpu(code, (3, y, x), kwargs={"scale": scale})
    torch.testing.assert_close(out, x / scale - y)
    with pytest.raises(ValueError, match="was not passed"):
        run_on_cpu(code, (3, y, x))


def test_dynamic_size_runs_at_another_size():
    code = generate_code(normalise, torch.randn(8, 64), torch.randn(8, 64), dynamic_inputs=(0, 1))
    x, y = torch.randn(13, 64), torch.randn(13, 64)
    for actual, expected in zip(run_on_cpu(code, (x, y)), normalise(x, y), strict=True):
        torch.testing.assert_close(actual, expected)


def test_module():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 32)
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x):
            self.calls.add_(1)
            return self.inner(x)

    module = Counting().requires_grad_(False)

    x = torch.randn(4, 16)
    code = generate_code(module, x)
    (out,) = run_on_cpu(code, (x,), module=module)
    assert module.calls.tolist() == [1, 1, 1]
    torch.testing.assert_close(out, module.inner(x))
    with pytest.raises(ValueError, match="module="):
        run_on_cpu(code, (x,))


def test_bytes_outside_a_view_survive():
    room = torch.randn(6, 100)
    total, x = room[1:5, 8:72], torch.randn(4, 64)
    code = generate_code(accumulate, total, x)
    expected = room.clone()
    expected[1:5, 8:72] += x
    run_on_cpu(code, (total, x))
    assert torch.equal(room, expected)


def test_arguments_that_alias():
    def shift(a, b):
        a.add_(1)
        return b * 2 + b.new_ones(4)

    room = torch.zeros(8)
    (out,) = run_on_cpu(generate_code(shift, room[:4], room[2:6]), (room[:4], room[2:6]))
    assert out.tolist() == [3, 3, 1, 1]
    assert room.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    view, whole = run_on_cpu("def call(args):\n    return args[1][2:4], args[1]\n", [room[:4], room])
    view.fill_(5)
    assert room[2] == 5 and whole.data_ptr() == room.data_ptr()


def test_errors_of_the_worker_come_back():
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*in call.*ZeroDivisionError"):
        run_on_cpu("def call(args):\n    return 1 / 0\n", [])
    with pytest.raises(WorkerError, match="died with exit status 7"):
        run_on_cpu("import os\ndef call(args):\n    os._exit(7)\n", [])
    (out,) = run_on_cpu("def call(args):\n    return (args[0] + 1,)\n", [torch.ones(2)])
    assert torch.equal(out, torch.full((2,), 2.0))


def test_template_op(scores_op):
    args = _scores_inputs()
    code = generate_code(lambda *args: torch.relu(scores_op(*args)), *args)
    assert len(code.launches) == code.count("scores") == 1
    assert [allocation.size for allocation in code.allocations] == [(5, 40)]
    eager = [arg.clone() for arg in args]
    expected = torch.relu(_scores(*eager))
    (out,) = run_on_cpu(code, args)
    torch.testing.assert_close(out, expected)
    assert torch.equal(args[1], eager[1])


def test_caller_may_interpret():
    script = """
        import torch
        from swa_inductor.testing import resource_usage
        (usage,) = resource_usage(torch.sin, torch.randn(64))
        assert usage.registers > 0
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=True)


def run_kernel(body: str, *args: torch.Tensor | int) -> None:
    """Runs one program of a Triton kernel with arguments a, b, c, ... as far as there are."""
    names = "abcdefg"[: len(args)]
    lines = ["import triton", "import triton.language as tl", "@triton.jit", f"def kernel({', '.join(names)}):"]
    lines += [
        textwrap.indent(textwrap.dedent(body), "    "),
        "def call(args):",
        "    kernel[(1,)](*args)",
        "    return ()",
    ]
    run_on_cpu("\n".join(lines) + "\n", args)


def test_write_outside_an_argument_is_an_error():
    for body in ("tl.store(b + tl.arange(0, 16), 1.0)", "tl.store(b - 1 + tl.arange(0, 8), 1.0)"):
        with pytest.raises(WorkerError, match=r"wrote outside the storage of input\(s\) \[1\]"):
            run_kernel(body, torch.zeros(16), torch.zeros(10))


ALL_BF16 = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)


def equal_or_nan(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    both_nan = actual.isnan() & expected.isnan()
    bits = torch.int16 if actual.element_size() == 2 else torch.uint8
    return bool((both_nan | (actual.view(bits) == expected.view(bits))).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
def test_conversions_of_every_value(dtype):
    """E11: the interpreter, as repaired here, rounds all bf16 values as torch does; fp8 saturates as the hardware."""
    body = "i = tl.arange(0, {size})\ntl.store(b + i, tl.load(a + i).to(b.dtype.element_ty))"
    values, out = ALL_BF16.float(), torch.zeros(65536, dtype=dtype)
    run_kernel(body.format(size=65536), ALL_BF16, out)
    if dtype.itemsize == 1:  # cvt.rn.satfinite
        limit = torch.finfo(dtype).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
        codes, decoded = torch.arange(256, dtype=torch.uint8).view(dtype), torch.zeros(256, dtype=torch.bfloat16)
        run_kernel(body.format(size=256), codes, decoded)
        assert equal_or_nan(decoded, codes.bfloat16())
    assert equal_or_nan(out, values.to(dtype))


def test_float32_rounds_to_bf16():
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000], dtype=torch.int32)
    values = torch.cat([halfway, torch.randint(-(2**31), 2**31 - 1, (8186,), dtype=torch.int32)]).view(torch.float32)
    out = torch.zeros(8192, dtype=torch.bfloat16)
    run_kernel("i = tl.arange(0, 8192)\ntl.store(b + i, tl.load(a + i).to(tl.bfloat16))", values, out)
    assert equal_or_nan(out, values.bfloat16())


def test_bf16_arithmetic():
    """E11: on values, not on bit patterns."""
    x, y = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    out = torch.zeros(10, 256, dtype=torch.bfloat16)
    body = """
        i = tl.arange(0, 256)
        x = tl.load(a + i)
        y = tl.load(b + i)
        tl.store(c + i, x + y)
        tl.store(c + 256 + i, x * y)
        tl.store(c + 512 + i, tl.where(x > y, x, y))
        tl.store(c + 768 + i, tl.maximum(x, 0.0) - tl.abs(y))
        tl.store(c + 1024 + i, (x > y).to(tl.bfloat16))
        tl.store(c + 1280 + i, (i - 128).to(tl.bfloat16))
        tl.store(c + 1536 + i, (x * 100).to(tl.int32).to(tl.bfloat16))
        tl.store(c + 1792 + i, tl.fma(x, y, x))
        tl.store(c + 2048 + i, tl.clamp(x, y - y, y - y + 1))
        tl.store(c + 2304 + i, x + tl.full([256], 1.25, tl.bfloat16))
    """
    run_kernel(body, x, y, out)
    signed = torch.arange(-128, 128).bfloat16()
    fused = (x.float() * y.float() + x.float()).bfloat16()
    expected = [x + y, x * y, torch.maximum(x, y), x.relu() - y.abs(), (x > y).bfloat16(), signed]
    expected += [(x * 100).int().bfloat16(), fused, x.clamp(0, 1), x + 1.25]
    assert torch.equal(out, torch.stack(expected))


def test_casts_of_bits_and_pointers():
    """A record of bf16, fp16, fp32, int16 and int32 fields, read through a uint8 pointer at a 64-bit offset."""
    fields = [torch.randn(16).bfloat16(), torch.randn(16).half(), torch.randn(16), torch.arange(-8, 8).short()]
    fields.append(torch.arange(16, dtype=torch.int32) * -100000)
    record = torch.cat([torch.zeros(48, dtype=torch.uint8), *(field.view(torch.uint8) for field in fields)])
    outs = [torch.zeros_like(field) for field in fields]
    body = """
        i = tl.arange(0, 16)
        base = a + tl.full([1], 48, tl.int64)
        x = tl.load(base.to(tl.pointer_type(tl.bfloat16), bitcast=True) + i)
        tl.store(b + i, x.to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True))
        x = tl.load((base + 32).to(tl.pointer_type(tl.float16), bitcast=True) + i)
        tl.store(c + i, x.to(tl.int16, bitcast=True).to(tl.float16, bitcast=True))
        x = tl.load((base + 64).to(tl.pointer_type(tl.float32), bitcast=True) + i)
        tl.store(d + i, x.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True))
        tl.store(e + i, tl.load((base + 128).to(tl.pointer_type(tl.int16), bitcast=True) + i))
        tl.store(f + i, tl.load((base + 160).to(tl.pointer_type(tl.int32), bitcast=True) + i, mask=i < 16, other=7))
        tl.store(g + i, ~tl.load(a + i))
    """
    inverted = torch.zeros(16, dtype=torch.uint8)
    run_kernel(body, record, *outs, inverted)
    assert torch.equal(inverted, 255 - record[:16])
    for out, field in zip(outs, fields, strict=True):
        assert torch.equal(out, field)


def test_e4m3_by_integer_arithmetic():
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256, dtype=torch.bfloat16)
    body = """
        i = tl.arange(0, 256)
        x = tl.load(a + i).to(tl.int16)
        bits = ((x & 0x7F) << 4) | ((x & 0x80) << 8)
        tl.store(b + i, (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36).to(tl.bfloat16))
    """
    run_kernel(body, codes, out)
    expected = codes.view(torch.float8_e4m3fn).bfloat16()
    assert torch.equal(out[~expected.isnan()], expected[~expected.isnan()])


def test_scalars_loops_and_shapes():
    """E11: masked lanes hold `other`, and a dot of bf16 multiplies values."""
    bounds, x = torch.tensor([3, 11], dtype=torch.int32), torch.randn(16, 16)
    out, shapes = torch.zeros(16), torch.zeros(16, 16)
    body = """
        STEP: tl.constexpr = 2
        i = tl.arange(0, 16)
        lo = tl.maximum(tl.load(a), 1)
        hi = tl.minimum(tl.load(a + 1), c)
        total = tl.zeros([16], tl.float32)
        for row in range(lo, hi, STEP):
            total += tl.load(b + row * 16 + i, mask=i < 12, other=1.0)
        for row in tl.range(0, tl.cdiv(hi, 8)):
            total += row
        tl.store(d + i, total)
        tile = tl.load(b + i[:, None] * 16 + i[None, :])
        twice = tl.reshape(tl.trans(tl.reshape(tile, (16, 8, 2)), (0, 2, 1)), (16, 16))
        product = tl.dot(twice.to(tl.bfloat16), tl.trans(twice).to(tl.bfloat16), input_precision="ieee")
        peak = tl.max(product, 1)
        tl.store(e + i[:, None] * 16 + i[None, :], product - peak[:, None] + tl.min(peak, 0) + tl.sum(tile) + ~lo)
    """
    run_kernel(body, bounds, x, 10, out, shapes)
    rows = x[3:10:2].clone()
    rows[:, 12:] = 1
    torch.testing.assert_close(out, rows.sum(0) + 1)
    twice = x.reshape(16, 8, 2).transpose(1, 2).reshape(16, 16).bfloat16().float()
    product = twice @ twice.T
    peak = product.amax(1)
    torch.testing.assert_close(shapes, product - peak[:, None] + peak.min() + x.sum() - 4, rtol=1e-5, atol=1e-4)


def test_libdevice_and_combine_functions():
    x = torch.rand(4, 64) + 0.5
    functions = [torch.tanh, torch.exp2, torch.rsqrt, torch.erf, torch.expm1]
    fn = lambda x: ([f(x) for f in functions], torch.var(x, -1), x.argmax(-1), x.cumsum(-1))  # noqa: E731
    values, variance, index, running = fn(x)
    outs = run_on_cpu(generate_code(fn, x), (x,))
    for out, expected in zip(outs, (*values, variance, index, running), strict=True):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_resource_usage(scores_op, capability):
    (usage,) = resource_usage(scores_op, *_scores_inputs(), capability=capability)
    assert "scores" in usage.name
    assert (usage.num_warps, usage.num_stages, usage.spills) == (4, 2, 0)
    assert 16 <= usage.registers <= 255
    assert 16 * 32 * 2 <= usage.shared_bytes <= 49152
