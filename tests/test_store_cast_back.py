"""swa_inductor::store_cast_back: the bytes of store, and the values as they will be read."""

from __future__ import annotations

import pytest
import torch
from cases import (
    BY_NAME,
    CASES,
    EPS,
    STORE_ARGS,
    TURN_ARGS,
    Case,
    cast_back_op,
    decode_inputs,
    norm_inputs,
    store_op,
    template_launches,
)
from numerics import assert_same

from swa_inductor import records
from swa_inductor.reference_rope import norm_rope
from swa_inductor.testing import generate_code, run_on_cpu


def run_cpp(case: Case, args: list) -> tuple:
    torch._dynamo.reset()
    return torch.compile(cast_back_op(case), fullgraph=True)(*args)


RUNS = {
    "eager": lambda case, args: cast_back_op(case)(*args),
    "cpp": run_cpp,
    "sm_90": lambda case, args: run_on_cpu(generate_code(cast_back_op(case), *args), args),
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bytes_and_values(case: Case) -> None:
    x = decode_inputs(case)
    x["k"][3, 0, 5], x["k"][4, 0, 0] = float("nan"), float("inf")
    want = x["cache"].clone()
    store_op(case)(x["k"], x["v"], want, x["state_ids"], x["positions"])
    back = [None if t is None else records.round_trip(t, case.spec.kv_format, 1e-4) for t in (x["k"], x["v"])]
    for name, run in RUNS.items():
        if name == "cpp" and case.name not in ("v4", "gpt-oss"):
            continue  # a C++ compile takes seconds; the two cover K = V and both formats
        cache = x["cache"].clone()
        k, *v = run(case, [cache if arg == "cache" else x[arg] for arg in STORE_ARGS])
        assert_same(cache, want)
        torch.testing.assert_close(k, back[0], rtol=0, atol=0, equal_nan=True)
        if back[1] is not None:
            torch.testing.assert_close(v[0], back[1], rtol=0, atol=0, equal_nan=True)


def test_one_kernel_with_its_producer_and_consumer() -> None:
    case = BY_NAME["v4"]
    x = decode_inputs(case)

    def fn(k: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return cast_back_op(case)(k * 2, *rest)[0].float() + 1

    args = [x[n] for n in STORE_ARGS]
    code = generate_code(fn, *args)
    assert len(template_launches(code)) == len(code.launches) == 1
    want_cache = x["cache"].clone()
    want = fn(x["k"], None, want_cache, *args[3:])
    assert_same(run_on_cpu(code, args)[0], want)
    assert_same(x["cache"], want_cache)


@pytest.mark.parametrize(("name", "interleaved"), [("v4", True), ("gpt-oss", False)])
def test_norm_and_rope(name: str, interleaved: bool) -> None:
    """k comes back as the ring holds it; so do rows that write nothing, at the nearest position of the table."""
    case = BY_NAME[name]
    x = norm_inputs(case, decode_inputs(case))
    k = norm_rope(x["k"], x["positions"], x["norm_weight"], EPS, x["rope"], interleaved)
    want = x["cache"].clone()
    store_op(case)(k, x["v"], want, x["state_ids"], x["positions"])
    k = records.round_trip(k, case.spec.kv_format, 1e-4)
    assert (x["positions"] < 0).any()
    op = cast_back_op(case, EPS, interleaved)
    for how in ("eager", "cpp", "sm_90"):
        torch._dynamo.reset()
        cache = x["cache"].clone()
        args = [cache if n == "cache" else x[n] for n in TURN_ARGS]
        if how == "sm_90":
            back, *_ = run_on_cpu(generate_code(op, *args), args)
        else:
            back, v = (torch.compile(op, fullgraph=True) if how == "cpp" else op)(*args)
            assert (
                v is None if x["v"] is None else torch.equal(v, records.round_trip(x["v"], case.spec.kv_format, 1e-4))
            )
        assert_same(back, k)
        assert_same(cache, want)
