"""swa_inductor::prepare_decode: the code it compiles to, its buffers, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, flat, prepare_op, template_launches, unflat, vectors
from numerics import assert_same
from runs import ints
from test_prepare_decode import SLOTS, V4, every_form, random_batch, runs, step, tensors, twin
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor.testing import generate_code, run_on_cpu


@every_form
@pytest.mark.parametrize("width", [None, 128])
def test_one_kernel(form: str, width: int | None) -> None:
    """D11: one launch for any number of sequences: nothing extern, no copy, no read-back; `out` allocates nothing."""
    code = runs(V4, width, form).code()
    FileCheck().check_count(".run(", 1, exactly=True).run(code.call)
    FileCheck().check("triton_tem_fused_prepare_decode").check_not("extern").check_not("torch.ops").check_not(
        "copy_("
    ).check_not(".item()").check_not("cpu").run(code.call)
    assert code.launches == ("triton_tem_fused_prepare_decode_0",)
    assert len(code.allocations) == (0 if form == "out" else 7 + (width is not None))


def test_cpp_writes_the_buffers_directly() -> None:
    """No copy of a result: no call but of our loops, and no second index."""
    args = tensors(random_batch(6, range(9), 0))
    out = flat(swa.PreparedDecode.allocate(V4, 9, width=128))
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(prepare_op(V4, SLOTS, 128), fullgraph=True), *args, *out)
    call = code[code.index("def call(") :]
    FileCheck().check("cpp_fused_prepare_decode").check_not("extern_kernels").check_not("torch.ops").run(call)
    FileCheck().check_not("empty_strided_cpu((54, 128)").check_not("copy_").run(call)


def test_a_step_is_three_kernels() -> None:
    """D11: metadata, store and attention in one graph, nothing between them."""
    case = BY_NAME["v4"]
    k, _, q = vectors(case, 18)
    cache = torch.zeros(V4.cache_shape(SLOTS), dtype=torch.uint8)

    def fn(k, q, cache, lengths, accepted, ids, *buffers):  # noqa: ANN001, ANN202
        out = unflat(*buffers)
        m = swa.prepare_decode(lengths, accepted, ids, spec=V4, num_slots=SLOTS, out=out).metadata
        swa.store(k, None, cache, m.state_ids, m.positions, spec=V4)
        return swa.attention(q, cache, m.state_ids, m.positions, spec=V4, valid_start=m.valid_start, tokens_per_step=6)

    def args() -> list[torch.Tensor]:
        out = flat(swa.PreparedDecode.allocate(V4, 3))
        return [k, q, cache.clone(), *tensors(step([1000, 45, 294], [6, 1, 3], [0, 4, -1]))[:3], *out]

    mine, theirs = args(), args()
    code = generate_code(fn, *mine)
    kernels = ["prepare_decode", "store", "attention"]
    assert [next(n for n in kernels if n in launch) for launch in template_launches(code)] == kernels
    assert "copy_(" not in code.call
    got = run_on_cpu(code, mine)[0]
    torch.testing.assert_close(got, fn(*theirs), rtol=3e-2, atol=3e-2)
    for value, expected in zip(mine[2:], theirs[2:], strict=True):
        assert_same(value, expected)


def test_only_the_device_knows_lengths() -> None:
    """F5: no length, position or count is a number of the host's: values change, compiled code does not."""
    schema = torch.ops.swa_inductor.prepare_decode.default._schema
    numbers = [a.name for a in schema.arguments if not isinstance(a.type, torch.TensorType) and a.kwarg_only]
    assert numbers == ["tokens_per_step", "window", "ring_rows", "num_slots", "width"]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(prepare_op(V4, SLOTS), fullgraph=True, backend=counter)
    for lengths in ([1006, 51, 300], [1007, 52, 301], [1000, 45, 294]):
        batch = step(lengths, [6, 1, 3], [0, 4, 2])
        for value, expected in zip(compiled(*tensors(batch)), flat(twin(V4, batch)), strict=True):
            assert_same(value, expected)
    assert counter.frame_count == 1


def test_strided_inputs() -> None:
    """A17: columns of wider tensors."""
    batch = random_batch(6, range(0, 900, 100), 1)
    args = [torch.stack([a, a * 0 + 99], 1)[:, 0] for a in tensors(batch)]
    fn, want = prepare_op(V4, SLOTS, 130), flat(twin(V4, batch, 130))
    for got in (fn(*args), run_on_cpu(generate_code(fn, *args), args)):
        for value, expected in zip(got, want, strict=True):
            assert_same(value, expected)


def test_buffers_may_not_be_inputs() -> None:
    """F6: a step that reads what it wrote would count the accepted tokens twice."""
    out = swa.PreparedDecode.allocate(V4, 2)
    wide = torch.zeros(4, dtype=torch.int64)
    for lengths, mine in ((out.lengths, out), (wide[1:3], out._replace(lengths=wide[:2]))):
        with pytest.raises(swa.InvalidArgumentError, match="out.new_lengths: got memory of an input"):
            swa.prepare_decode(lengths, ints(1, 1), ints(0, 1), spec=V4, num_slots=SLOTS, out=mine)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="out.new_lengths: got memory of an input"):
        args = out.lengths, ints(1, 1), ints(0, 1), None, None, *flat(out)
        torch.compile(prepare_op(V4, SLOTS), fullgraph=True, backend="aot_eager")(*args)
    swa.prepare_decode(wide[:2], ints(1, 1), ints(0, 1), spec=V4, num_slots=SLOTS, out=out._replace(lengths=wide[2:]))
    assert wide.tolist() == [0, 0, 1, 1] and (out.metadata.state_ids.view(2, 6)[:, 0] == ints(0, 1)).all()
