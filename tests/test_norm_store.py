"""swa_inductor::norm_store: norm, RoPE, cast and write of k, and the norm of other rows, in one kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import (
    BY_NAME,
    EPS,
    FP32,
    NORM_STORE_ARGS,
    X_EPS,
    Case,
    decode_inputs,
    norm_inputs,
    norm_store_op,
    template_launches,
    vectors,
)
from numerics import assert_as_good_as, assert_same, relative_error
from test_store import plain_store
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor import records
from swa_inductor.reference_rope import norm_rope, rms_norm
from swa_inductor.testing import generate_code, resource_usage, run_on_cpu


def run_eager(op, args: list) -> torch.Tensor:  # noqa: ANN001
    return op(*args)


def run_cpp(op, args: list) -> torch.Tensor:  # noqa: ANN001
    torch._dynamo.reset()
    return torch.compile(op, fullgraph=True)(*args)


def run_generated(op, args: list) -> torch.Tensor:  # noqa: ANN001
    (out,) = run_on_cpu(generate_code(op, *args), args)
    return out


RUNS = {"eager": run_eager, "cpp": run_cpp, "sm_90": run_generated}
COMPILED = pytest.mark.parametrize("run", [run_cpp, run_generated])
both_kinds = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
# name, width of x, rope_dim, heads of k
SHAPES = [
    ("v4", 1280, 64, 1),
    ("gpt-oss", 40, 64, 4),
    ("mimo", 257, 64, 2),
    ("odd-group", 1, 10, 1),
    ("gemma3-fp32", 64, 256, 1),
    ("fp32-mxfp8", 96, 2, 4),
]


def with_heads(case: Case, heads: int) -> Case:
    return replace(case, spec=replace(case.spec, num_kv_heads=heads), heads=heads * case.heads)


def stored(case: Case, x: dict, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache and the rows of x that the reference gives."""
    k = norm_rope(x["k"], x["positions"], x["norm_weight"], EPS, x["rope"], interleaved)
    beyond = x["positions"] >= len(x["rope"])
    ids, cache = torch.where(beyond, -1, x["state_ids"]), x["cache"].clone()
    plain_store(case, k, x["v"], cache, ids.tolist(), x["positions"].tolist())
    return cache, rms_norm(x["x"], x["x_weight"], X_EPS).to(case.dtype)


@pytest.mark.parametrize(("name", "width", "rope_dim", "heads"), SHAPES)
@both_kinds
def test_bytes_and_rows(name: str, width: int, rope_dim: int, heads: int, interleaved: bool) -> None:
    """The same bits in every implementation, from slices of one merged projection."""
    case = with_heads(BY_NAME[name], heads)
    x = norm_inputs(case, decode_inputs(case), width, rope_dim)
    want_cache, want = stored(case, x, interleaved)
    assert not torch.equal(want_cache, x["cache"])
    for how, run in RUNS.items():
        if how == "cpp" and (name not in ("v4", "gpt-oss") or interleaved != (name == "v4")):
            continue  # a C++ compile takes seconds; the two cover the formats and both kinds of RoPE
        cache = x["cache"].clone()
        out = run(norm_store_op(case, EPS, interleaved), [cache if n == "cache" else x[n] for n in NORM_STORE_ARGS])
        assert out.is_contiguous()
        assert_same(out, want)
        assert_same(cache, want_cache)


@both_kinds
def test_meaning(interleaved: bool) -> None:
    """Against the formulas in fp64, written down once more: pairs as complex numbers."""
    case = BY_NAME["gemma3-fp32"]
    x = norm_inputs(case, decode_inputs(case), rope_dim=96)
    norm_store_op(case, EPS, interleaved)(*(x[n] for n in NORM_STORE_ARGS))
    for t, (slot, p) in enumerate(zip(x["state_ids"].tolist(), x["positions"].tolist(), strict=True)):
        if slot < 0:
            continue
        k = x["k"][t, 0].double()
        k = k / math.sqrt(k.square().mean() + EPS) * x["norm_weight"]
        pairs = k[-96:].view(48, 2) if interleaved else k[-96:].view(2, 48).T
        angle = torch.complex(*x["rope"][p].double().chunk(2))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
        k[-96:] = turned.flatten() if interleaved else turned.T.flatten()
        got, _ = records.decode_record(x["cache"][slot, p % case.spec.rows], "fp32", 256, 256)
        assert relative_error(got[0], k) < 1e-6


@both_kinds
def test_random_values_in_generated_code(interleaved: bool) -> None:
    """As close to fp64 as the reference; bytes differ only where a sum in another order moves a value over a tie."""
    case = BY_NAME["v4"]
    x = decode_inputs(case)
    x = dict(norm_inputs(case, x, 1280), k=x["k"], x=torch.randn(len(x["k"]), 1280).bfloat16() * 3)
    want_cache, want = stored(case, x, interleaved)
    args = [x[n] for n in NORM_STORE_ARGS]
    out = run_generated(norm_store_op(case, EPS, interleaved), args)
    assert (x["cache"] != want_cache).float().mean() < 1e-4
    assert_as_good_as(out, rms_norm(x["x"].double(), x["x_weight"], X_EPS), want, factor=1.001)


@COMPILED
def test_rows_that_count_as_padding(run) -> None:  # noqa: ANN001
    """Padded rows, bad slots, positions beyond the table: they write no byte, whatever k holds there; x is normalised.

    A row beyond the table supersedes nothing either: the row R positions before it is written.
    """
    case = BY_NAME["v4"]
    rows = case.spec.rows
    ids = [3, -1, 4, 2**31 - 1, -7, 1, 1, 0] + [2] * (rows + 1)
    at = [12, 5, 5, 5, 5, -3, rows + 7, rows + 6, *range(7, 8 + rows)]
    k, _, _ = vectors(case, len(ids))
    start = torch.randint(0, 256, case.spec.cache_shape(4), dtype=torch.uint8)
    given = {"k": k, "v": None, "cache": start, "state_ids": torch.tensor(ids, dtype=torch.int32)}
    x = norm_inputs(case, {**given, "positions": torch.tensor(at)}, rows=rows + 7)
    assert ids[8] == ids[-1] and at[8] + rows == at[-1] == len(x["rope"])
    alive = torch.tensor([i in (0, 1, 2, 3) and 0 <= p < rows + 7 for i, p in zip(ids, at, strict=True)])
    assert alive.sum() == rows + 2
    x["k"][~alive] = math.nan
    live = {**x, "state_ids": torch.where(alive, x["state_ids"], -1), "positions": x["positions"].clamp(min=0)}
    want_cache, want = stored(case, live, True)
    cache = start.clone()
    out = run(norm_store_op(case), [cache if n == "cache" else x[n] for n in NORM_STORE_ARGS])
    assert_same(cache, want_cache)
    assert_same(out, want)


def test_any_number_of_tokens() -> None:
    """One compilation of the sm_90 source for all T and all lengths of the table; T = 0 writes nothing."""
    case = BY_NAME["gpt-oss"]
    x = norm_inputs(case, decode_inputs(case))
    args = [x[n] for n in NORM_STORE_ARGS]
    op = norm_store_op(case, EPS, False)
    per_token = [i for i, n in enumerate(NORM_STORE_ARGS) if n in ("x", "k", "v", "state_ids", "positions")]
    code = generate_code(op, *args, dynamic_inputs=[*per_token, NORM_STORE_ARGS.index("rope")])
    for tokens in (0, 1, 7, 20):
        some = [a[:tokens] if i in per_token else a.clone() for i, a in enumerate(args)]
        again = [a.clone() for a in some]
        want = op(*again)
        (out,) = run_on_cpu(code, some)
        assert_same(out, want)
        assert_same(some[4], again[4])


def test_neighbours_fuse() -> None:
    """Producers of x and v and a consumer of the rows are part of the kernel; k, read twice, comes from memory."""
    case = BY_NAME["gpt-oss"]
    x = norm_inputs(case, decode_inputs(case))

    def fn(x, x_weight, k, v, *rest):  # noqa: ANN001, ANN002, ANN202
        return norm_store_op(case, EPS, False)(x * 2, x_weight, k, v + 1, *rest).float() * 3

    args = [x[n] for n in NORM_STORE_ARGS]
    code = generate_code(fn, *args)
    assert len(code.launches) == 1 and len(code.allocations) == 1
    want_cache = x["cache"].clone()
    want = fn(*args[:4], want_cache, *args[5:])
    assert_same(run_on_cpu(code, args)[0], want)
    assert_same(x["cache"], want_cache)
    (usage,) = resource_usage(fn, *args)
    assert usage.spills == 0


def test_one_vector_as_k_and_v() -> None:
    """A producer of both stays outside: K is read from memory, V may not take its place."""
    case = BY_NAME["gpt-oss"]
    x = norm_inputs(case, decode_inputs(case))

    def fn(x, x_weight, k, v, *rest):  # noqa: ANN001, ANN002, ANN202
        return norm_store_op(case)(x, x_weight, k * 2, k * 2, *rest)

    args = [x[n] for n in NORM_STORE_ARGS]
    want_cache = x["cache"].clone()
    want = fn(*args[:4], want_cache, *args[5:])
    code = generate_code(fn, *args)
    assert len(template_launches(code)) == 1
    assert_same(run_on_cpu(code, args)[0], want)
    assert_same(x["cache"], want_cache)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["sm_90", "sm_100"])
def test_one_kernel_between_two_projections(capability: tuple[int, int]) -> None:
    case = BY_NAME["v4"]
    x = norm_inputs(case, decode_inputs(case), 1280)
    weights = [torch.empty(256, 1792, dtype=torch.bfloat16), torch.empty(1280, 4096, dtype=torch.bfloat16)]

    def fn(hidden, qkv_a, q_b, x_weight, *rest):  # noqa: ANN001, ANN002, ANN202
        q_a, kv = (hidden @ qkv_a).split([1280, 512], -1)
        return norm_store_op(case)(q_a, x_weight, kv[:, None], None, *rest) @ q_b

    hidden = torch.empty(len(x["k"]), 256, dtype=torch.bfloat16)
    code = generate_code(
        fn, hidden, *weights, x["x_weight"], *(x[n] for n in NORM_STORE_ARGS[4:]), capability=capability
    )
    check = FileCheck().check("extern_kernels.mm(").check_count("_norm_store_", 1).check("extern_kernels.mm(")
    check.run(code.call)
    assert len(code.launches) == 1 and len(code.allocations) == 3


def test_wrong_values() -> None:
    case = BY_NAME["gpt-oss"]
    x = norm_inputs(case, decode_inputs(case))
    last = int(x["positions"].max())
    options = {"spec": case.spec, "x_eps": X_EPS}
    args = [x[n] for n in ("x", "k", "v", "cache", "state_ids", "positions")]
    before = x["cache"].clone()
    for more, message in (
        ({"x_eps": 0.0}, "x_eps: got 0.0; allowed: None (no norm) or a positive number"),
        ({"norm_eps": -1.0}, "norm_eps: got -1.0; allowed: None (no norm) or a positive number"),
        ({"norm_weight": x["norm_weight"]}, "norm_weight"),
        ({"rope": x["rope"][:last]}, f"positions: got [{last}]; allowed: below {last}, the positions of rope"),
    ):
        with pytest.raises(swa.InvalidArgumentError) as error:
            swa.norm_store(*args, **{**options, **more})
        assert message in str(error.value)
    odd = swa.RingSpec(4, 1, 33, shared_kv=True, kv_format="fp32")
    rest = (torch.zeros(odd.cache_shape(1), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), torch.arange(1))
    with pytest.raises(
        swa.InvalidArgumentError, match="head_dim: got 33; allowed: an even number with rope_interleaved"
    ):
        swa.store(torch.ones(1, 1, 33, dtype=FP32), None, *rest, spec=odd, rope=torch.ones(1, 2))
    assert torch.equal(x["cache"], before)
