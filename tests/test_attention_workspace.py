"""swa_inductor::attention_workspace: the workspace path gives what the ring path gives."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    CASES,
    GATHER_ARGS,
    PREFILL_ARGS,
    QUERY_ARGS,
    Case,
    gather_op,
    plain_pivots,
    prefill_inputs,
    template_launches,
    workspace_op,
)
from numerics import assert_as_good_as, assert_same

from swa_inductor import reference
from swa_inductor.testing import generate_code, run_on_cpu


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_attention_prefill(case: Case) -> None:
    x = prefill_inputs(case)
    k, v = gather_op(case)(*(x[n] for n in GATHER_ARGS))
    args = (x["q"], k, v, plain_pivots(case, x), x["sinks"])
    spec = case.spec
    want, want_lse = reference.attention_prefill(
        *(x[n] for n in PREFILL_ARGS[: -len(QUERY_ARGS)]),
        spec.window,
        spec.head_dim**-0.5,
        spec.kv_format,
        case.softcap,
        torch.float64,
    )
    exact, exact_lse = reference.attention_workspace(
        *args, spec.window, spec.head_dim**-0.5, case.softcap, torch.float64
    )
    torch.testing.assert_close(exact, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(exact_lse, want_lse, rtol=1e-9, atol=1e-12)
    code = generate_code(workspace_op(case), *args)
    assert len(template_launches(code)) == len(code.launches) == 1
    plain, _ = reference.attention_workspace(*args, spec.window, spec.head_dim**-0.5, case.softcap, case.dtype)
    live = x["state_ids"] >= 0
    factor = 2.0 if case.dtype == torch.float32 else 1.0
    for out, lse in (run_on_cpu(code, args), workspace_op(case)(*args)):
        assert not out[~live].any() and (lse[~live] == -math.inf).all()
        assert_as_good_as(out[live], want[live], plain[live].to(case.dtype), factor)
        torch.testing.assert_close(lse[live].double(), want_lse[live], rtol=1e-5, atol=2e-5)


def test_rows_outside_the_ranges_are_not_read() -> None:
    case = CASES[0]
    x = prefill_inputs(case)
    k, v = gather_op(case)(*(x[n] for n in GATHER_ARGS))
    pivots = plain_pivots(case, x)
    seen = torch.zeros(len(k), dtype=torch.bool)
    for start1, len1, start2, len2 in pivots.tolist():
        seen[start1 : start1 + len1] = True
        seen[start2 : start2 + len2] = True
    poisoned = torch.where(seen[:, None, None], k, math.nan)
    code = generate_code(workspace_op(case), x["q"], k, v, pivots, None)
    for run in (lambda *a: run_on_cpu(code, a), workspace_op(case)):
        for value, was in zip(run(x["q"], poisoned, v, pivots, None), run(x["q"], k, v, pivots, None), strict=True):
            assert_same(value, was)


def test_bad_pivots_read_nothing_outside_the_workspace() -> None:
    """The interpreter faults on a read outside of an argument; the eager code masks such rows too."""
    case = CASES[0]
    x = prefill_inputs(case)
    k, v = gather_op(case)(*(x[n] for n in GATHER_ARGS))
    pivots = plain_pivots(case, x)
    code = generate_code(workspace_op(case), x["q"], k, v, pivots, None)
    last, window = len(k) - 1, case.spec.window
    for bad, good in (
        ((last, 128, 0, 0), (last, 1, 0, 0)),
        ((10**6, 5, 10**6, 5), (0, 0, 0, 0)),
        ((0, 10**6, 3, 1), (0, window, 0, 0)),  # in the kernel (0, window, 3, 1)
    ):
        pivots[0] = torch.tensor(good)
        want = workspace_op(case)(x["q"], k, v, pivots, None)
        pivots[0] = torch.tensor(bad)
        for value, expected in zip(workspace_op(case)(x["q"], k, v, pivots, None), want, strict=True):
            assert_same(value, expected)
        out, _ = run_on_cpu(code, (x["q"], k, v, pivots, None))
        assert out.isfinite().all()
        torch.testing.assert_close(out[1:].float(), want[0][1:].float(), rtol=1e-2, atol=1e-2)
        if good[1] < window:
            torch.testing.assert_close(out[0].float(), want[0][0].float(), rtol=1e-2, atol=1e-2)
