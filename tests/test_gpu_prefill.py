"""Prefill and metadata ops as compiled kernels on the device, against the reference on the CPU (`pytest -m gpu`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import cases
import pytest
import torch
from cases import (
    BY_NAME,
    CASES,
    FUSED_CASES,
    GATHER_ARGS,
    PREFILL_ARGS,
    STORE_ARGS,
    Case,
    cast_back_op,
    decode_inputs,
    gather_op,
    index_op,
    inlined_calls,
    plain_pivots,
    prefill_inputs,
    prefill_op,
    vectors,
    workspace_op,
)
from numerics import assert_as_good_as, assert_same
from test_attention_index import ring_index
from test_attention_prefill import exact
from test_contract import op_calls
from test_gather import plain as plain_gather
from test_gpu import to_gpu

import swa_inductor as swa
from swa_inductor import records, reference
from swa_inductor.meta._library import OPS

pytestmark = pytest.mark.gpu
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
SMALL = (1, 7, 0, 40, 3)
MIXED = (1, 120, 0, 150, 29)  # 300 tokens of five sequences, decode and prefill
LONG = (700,)


class OnGpu:
    """A function compiled once; calls take and give CPU tensors, and leave in `args` what they mutated."""

    def __init__(self, fn: Callable) -> None:
        torch._dynamo.reset()
        self.fn = torch.compile(fn, fullgraph=True)

    def __call__(self, *args: torch.Tensor | None) -> tuple:
        args = to_gpu(list(args))
        out = self.fn(*args)
        self.args = [None if t is None else t.cpu() for t in args]
        return tuple(None if t is None else t.cpu() for t in (out if isinstance(out, tuple) else (out,)))


@cache
def batch(case: Case, q_lens: tuple) -> tuple[dict, tuple, torch.Tensor]:
    """A batch, what attention over it is in fp64, and what it is in the input dtype."""
    x = prefill_inputs(case, len(q_lens) + 20, q_lens)
    return x, exact(case, x), exact(case, x, case.dtype)[0]


def batches(case: Case) -> list[tuple]:
    """The first compiles for its size, the others for any."""
    return [SMALL, MIXED, LONG] if case.name in ("v4", "gpt-oss") else [SMALL, MIXED]


def judge(case: Case, got: tuple, want: tuple, plain: torch.Tensor, live: torch.Tensor) -> None:
    """Attention (out, lse) against fp64, relative to the error of the plain computation in the input dtype."""
    (out, lse), (exact_out, exact_lse) = got, want
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    assert not out[~live].any() and (lse[~live] == -torch.inf).all()
    factor = 2.0 if case.dtype == torch.float32 else 1.0
    assert_as_good_as(out[live], exact_out[live], plain[live].to(case.dtype), factor)
    torch.testing.assert_close(lse[live].double(), exact_lse[live], rtol=1e-5, atol=5e-5)


@every_case
def test_store_cast_back(case: Case) -> None:
    run = OnGpu(cast_back_op(case))
    for seed in (21, 22):
        x = decode_inputs(case, seed)
        x["k"][3, 0, 5], x["k"][4, 0, 0] = float("nan"), float("inf")
        args = [x[n] for n in STORE_ARGS]
        got = run(*args)
        want = cast_back_op(case)(*args)
        assert_same(run.args[2], x["cache"])
        for value, expected in zip(got, want, strict=True):
            if expected is not None:
                torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@every_case
def test_gather(case: Case) -> None:
    run = OnGpu(gather_op(case))
    for seed in (21, 22):
        x = prefill_inputs(case, seed)
        for value, want in zip(run(*(x[n] for n in GATHER_ARGS)), plain_gather(case, x), strict=True):
            assert (value is None) == (want is None)
            if want is not None:
                assert_same(value, want)


@pytest.mark.parametrize("case", CASES + FUSED_CASES, ids=lambda c: c.name)
def test_attention_prefill(case: Case) -> None:
    run = OnGpu(prefill_op(case))
    for q_lens in batches(case):
        x = prefill_inputs(case, len(q_lens) + 20, q_lens)
        cases.judge(case, x, run(*(x[n] for n in PREFILL_ARGS)), exact)


@every_case
def test_attention_workspace(case: Case) -> None:
    """Gather, then attend over the workspace, in one compiled function: as the ring path."""

    def fn(q: torch.Tensor, pivots: torch.Tensor, sinks: torch.Tensor | None, *rest: torch.Tensor) -> tuple:
        return workspace_op(case)(q, *gather_op(case)(*rest), pivots, sinks)

    run = OnGpu(fn)
    for q_lens in batches(case):
        x, want, plain = batch(case, q_lens)
        got = run(x["q"], plain_pivots(case, x), x["sinks"], *(x[n] for n in GATHER_ARGS))
        judge(case, got, want, plain, x["state_ids"] >= 0)


@every_case
def test_attention_index(case: Case) -> None:
    x = decode_inputs(case, 25)
    args = [x["q"], x["cache"], ring_index(case, x), x["sinks"]]
    rest = (case.spec.head_dim**-0.5, case.spec.kv_format, case.spec.v_head_dim, case.softcap)
    plain, _ = reference.attention_index(*args, *rest, case.dtype)
    want = reference.attention_index(*args, *rest, torch.float64)
    got = OnGpu(index_op(case))(*args)
    judge(case, got, want, plain, x["state_ids"] >= 0)
    assert [t.shape for t in got] == [t.shape for t in want]


@pytest.mark.parametrize("name", ["v4", "gpt-oss", "fp32-mxfp8"])
def test_metadata_ops(name: str) -> None:
    """decode_index, prefill_plan, prefill_index, ring_read_raw: bit-equal to eager CPU code."""
    case = BY_NAME[name]
    for fn, args in inlined_calls(case, decode_inputs(case, 26)).values():
        want = fn(*args)
        for value, expected in zip(OnGpu(fn)(*args), want if isinstance(want, tuple) else (want,), strict=True):
            assert_same(value, expected)


@pytest.mark.parametrize("name", OPS)
def test_edge_sizes(name: str) -> None:
    """F12: no tokens, one, an odd number, one more than a power of two."""
    run = None
    for tokens in (129, 7, 1, 0):
        fn, args = op_calls(BY_NAME["gpt-oss"], tokens)[name]
        run = run or OnGpu(fn)
        got = (*run(*args), *run.args)
        want = fn(*args)
        for value, expected in zip(got, (*(want if isinstance(want, tuple) else (want,)), *args), strict=True):
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


def seen_history(case: Case, x: dict) -> torch.Tensor:
    """bool [slots, R]: ring rows that a query of the batch sees."""
    seen = torch.zeros(case.slots, case.spec.rows, dtype=torch.bool)
    for slot, p, start in zip(x["state_ids"].tolist(), x["positions"].tolist(), x["q_starts"].tolist(), strict=True):
        if slot >= 0:
            lo, n = case.spec.visible(p, 0 if x["lower"] is None else int(x["lower"][x["slots"] == slot][0]))
            history = torch.arange(lo, lo + n)
            seen[slot, history[history < start] % case.spec.rows] = True
    return seen


@pytest.mark.parametrize("name", ["v4", "gpt-oss", "mimo", "fp32-mxfp8", "window-1"])
def test_poison(name: str) -> None:
    """A11, A13: ring rows that no query sees, padded queries and their keys hold NaN: bit-equal outputs."""
    case = BY_NAME[name]
    x = prefill_inputs(case, 27, MIXED)
    run = OnGpu(prefill_op(case))
    clean = run(*(x[n] for n in PREFILL_ARGS))
    seen = seen_history(case, x)[..., None, None]
    padded = (x["state_ids"] < 0)[:, None, None]
    for poison in (0x7F, 0xFF):
        y = dict(x, cache=torch.where(seen, x["cache"], poison).to(torch.uint8))
        for n in ("q", "k", "v"):
            y[n] = None if x[n] is None else torch.where(padded, torch.nan, x[n])
        for value, was in zip(run(*(y[n] for n in PREFILL_ARGS)), clean, strict=True):
            assert_same(value, was)


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_any_split_of_a_prompt_gives_the_same(name: str) -> None:
    """A4, A5: attend and store in one compiled function, 1 x 1000, 8 x 125, 1000 x 1: the bytes of an eager store."""
    case = BY_NAME[name]
    k, v, q = vectors(case, 1000, 28)
    k, v = (None if t is None else records.round_trip(t, case.spec.kv_format, 1e-4) for t in (k, v))

    def fn(q, k, v, cache, ids, at, starts):  # noqa: ANN001, ANN202
        out = swa.attention_prefill(q, k, v, cache, ids, at, starts, spec=case.spec)
        swa.store(k, v, cache, ids, at, spec=case.spec)
        return out

    torch._dynamo.reset()
    step = torch.compile(fn, fullgraph=True)
    whole = torch.full(case.spec.cache_shape(2), 0x7F, dtype=torch.uint8)
    ids, at = torch.ones(1000, dtype=torch.int32), torch.arange(1000)
    swa.store(k, v, whole, ids, at, spec=case.spec)
    tokens = to_gpu([q, k, v])
    meta = to_gpu([ids, at])
    first = None
    for size in (1000, 125, 1):
        cache = torch.full(case.spec.cache_shape(2), 0x7F, dtype=torch.uint8, device="cuda")
        outs = []
        for begin in range(0, 1000, size):
            part = slice(begin, begin + size)
            starts = torch.full((size,), begin, device="cuda")
            outs.append(
                step(
                    *(None if t is None else t[part].clone() for t in tokens),
                    cache,
                    *(t[part].clone() for t in meta),
                    starts,
                )
            )
        out = torch.cat(outs)
        assert_same(cache.cpu(), whole)
        first = out if first is None else first
        torch.testing.assert_close(out, first, rtol=8e-3, atol=2e-3)


def test_same_every_time() -> None:
    """A4: a prefill of more than R tokens, 20 times: the same bytes and outputs."""
    case = BY_NAME["v4"]
    x = prefill_inputs(case, 29, LONG)
    args = to_gpu([x[n] for n in PREFILL_ARGS])

    def fn(q, k, v, cache, *meta):  # noqa: ANN001, ANN202
        out = prefill_op(case)(q, k, v, cache, *meta)
        swa.store(k, v, cache, *meta[:2], spec=case.spec)
        return out

    torch._dynamo.reset()
    step = torch.compile(fn, fullgraph=True)
    runs = []
    for _ in range(20):
        cache = args[3].clone()
        runs.append((*step(*args[:3], cache, *args[4:]), cache))
    for run in runs[1:]:
        for value, was in zip(run, runs[0], strict=True):
            assert_same(value, was)
