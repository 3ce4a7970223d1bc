"""swa_inductor::attention_prefill: ring history and new tokens, mixed batches, chunks, and what must not be read."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    BY_NAME,
    CASES,
    FUSED_CASES,
    PREFILL_ARGS,
    QUERY_ARGS,
    Case,
    judge,
    prefill_inputs,
    prefill_op,
    query_composed,
    template_launches,
    vectors,
)
from numerics import assert_same
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor import lowerings, records, reference
from swa_inductor.testing import GeneratedCode, generate_code, run_on_cpu

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def exact(
    case: Case, x: dict, dtype: torch.dtype = torch.float64, inner: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the dtype `inner`, norm and RoPE around it each rounded to `dtype`."""
    spec = case.spec
    rest = (spec.window, spec.head_dim**-0.5, spec.kv_format, case.softcap, inner or dtype)
    inputs = [x[name] for name in PREFILL_ARGS[1 : -len(QUERY_ARGS)]]
    return query_composed(case, x, dtype, lambda q: reference.attention_prefill(q, *inputs, *rest))


@every_case
def test_reference_is_store_and_attend_token_by_token(case: Case) -> None:
    """Against the ring op: with one token at a time, storing first is right, so the ring alone gives every answer."""
    x = prefill_inputs(case)
    want, want_lse = exact(case, x)
    cache = x["cache"].clone()
    for t in range(len(x["q"])):
        one = slice(t, t + 1)
        at = (x["state_ids"][one], x["positions"][one])
        v = None if x["v"] is None else x["v"][one]
        reference.store(x["k"][one], v, cache, *at, case.spec.kv_format, 1e-4)
        start = None if x["valid_start"] is None else x["valid_start"][one]
        out, lse = reference.attention(
            x["q"][one],
            cache,
            *at,
            start,
            x["sinks"],
            case.spec.window,
            case.spec.head_dim**-0.5,
            case.spec.kv_format,
            case.spec.v_head_dim,
            case.softcap,
            torch.float64,
        )
        torch.testing.assert_close(out[0], want[t], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(lse[0], want_lse[t], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES + FUSED_CASES, ids=lambda c: c.name)
def test_generated_source(case: Case) -> None:
    check_generated_source(case)


@pytest.mark.parametrize("shared", [1, 4, 16])
def test_tokens_that_share_a_window(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of 128 rows takes its tokens two at a time; with few processors, or many tokens, up to 16 in all."""
    monkeypatch.setattr(lowerings.attention_prefill, "tokens_that_share", lambda tokens, processors: shared)
    case = Case("64 heads", swa.RingSpec(21, 6, 512, shared_kv=True), 64, sinks=True, valid_start=True)
    code = check_generated_source(case)
    FileCheck().check(f"BLOCK_T : tl.constexpr = {max(2, shared)}").run(code.source)


def test_programs_cover_the_processors() -> None:
    tokens = {n: lowerings.attention_prefill.tokens_that_share(n, 132) for n in (0, 1, 132, 133, 1000, 2048, 10**6)}
    assert tokens == {0: 1, 1: 1, 132: 1, 133: 2, 1000: 8, 2048: 16, 10**6: 16}


def check_generated_source(case: Case) -> GeneratedCode:
    """The sm_90 source and the eager code against fp64, in the tokens of `prefill_inputs`."""
    x = prefill_inputs(case)
    args = [x[n] for n in PREFILL_ARGS]
    code = generate_code(prefill_op(case), *args)
    assert len(template_launches(code)) == len(code.launches) == 1
    for got in (run_on_cpu(code, args), prefill_op(case)(*args)):
        assert judge(case, x, got, exact) > 0
    return code


@pytest.mark.parametrize("name", ["v4", "gpt-oss", "fp32-mxfp8"])
def test_what_is_not_visible_is_not_read(name: str) -> None:
    """Other rows of the rings, padded queries and their keys hold NaN; B5, A11, A13."""
    case = BY_NAME[name]
    x = prefill_inputs(case)
    seen = torch.zeros(case.slots, case.spec.rows, dtype=torch.bool)
    for slot, p, start in zip(x["state_ids"].tolist(), x["positions"].tolist(), x["q_starts"].tolist(), strict=True):
        if slot >= 0:
            lo, n = case.spec.visible(p, 0 if x["valid_start"] is None else int(x["lower"][x["slots"] == slot][0]))
            history = torch.arange(lo, lo + n)
            seen[slot, history[history < start] % case.spec.rows] = True
    y = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in x.items()}
    y["cache"] = torch.where(seen[..., None, None], x["cache"], 0x7F)
    for n in ("q", "k", "v"):
        if y[n] is not None:
            y[n][x["state_ids"] < 0] = math.nan
    code = generate_code(prefill_op(case), *(x[n] for n in PREFILL_ARGS))
    for run in (lambda *a: run_on_cpu(code, a), prefill_op(case)):
        for value, was in zip(run(*(y[n] for n in PREFILL_ARGS)), run(*(x[n] for n in PREFILL_ARGS)), strict=True):
            assert_same(value, was)


def chunked(case: Case, q, k, v, chunks: list[int], attend) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN001
    """Prefill of one sequence in slot 1, chunk by chunk: attend, then store -> outputs and final cache."""
    cache = torch.full(case.spec.cache_shape(2), 0x7F, dtype=torch.uint8)
    outs, start = [], 0
    for n in chunks:
        part = slice(start, start + n)
        meta = (torch.ones(n, dtype=torch.int32), torch.arange(start, start + n))
        new_v = None if v is None else v[part]
        starts = torch.full((n,), start)
        outs.append(attend(q[part], k[part], new_v, cache, *meta, starts, None, None)[0])
        swa.store(k[part], new_v, cache, *meta, spec=case.spec)
        start += n
    return torch.cat(outs), cache


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_any_split_of_a_prompt_gives_the_same(name: str) -> None:
    """A4, A5: 1 x 1000, 8 x 125 and 1000 x 1: identical outputs (fp64 sums apart) and identical ring bytes."""
    case = BY_NAME[name]
    k, v, q = vectors(case, 1000)
    k, v = (None if t is None else records.round_trip(t, case.spec.kv_format, 1e-4) for t in (k, v))
    runs = [chunked(case, q, k, v, chunks, prefill_op(case)) for chunks in ([1000], [125] * 8, [1] * 1000)]
    for out, cache in runs[1:]:
        torch.testing.assert_close(out, runs[0][0], rtol=8e-3, atol=1e-3)
        assert_same(cache, runs[0][1])


def test_store_first_is_wrong_from_eight_new_tokens_on() -> None:
    """A4: with 7 new tokens the overwritten rows are visible to no query, with 8 the first query loses one."""
    case = BY_NAME["v4"]
    for n, same in ((7, True), (8, False)):
        k, _, q = vectors(case, 2048 + n)
        k = records.round_trip(k, "mxfp8", 1e-4)
        cache = torch.zeros(case.spec.cache_shape(1), dtype=torch.uint8)
        slot = torch.zeros(2048 + n, dtype=torch.int32)
        swa.store(k[:2048], None, cache, slot[:2048], torch.arange(2048), spec=case.spec)
        meta = (slot[2048:], torch.arange(2048, 2048 + n), torch.full((n,), 2048), None, None)
        right = prefill_op(case)(q[2048:], k[2048:], None, cache, *meta)[0]
        swa.store(k[2048:], None, cache, *meta[:2], spec=case.spec)
        wrong = prefill_op(case)(q[2048:], k[2048:], None, cache, *meta)[0]
        assert torch.equal(right, wrong) == same


def test_bounded_replay() -> None:
    """A11, A12: the last W tokens are recomputed with valid_start at the first replayed position; the old ring, full of
    NaN codes, is not read, and decode goes on from the replayed rows as if nothing had happened."""
    case = BY_NAME["v4"]
    spec, total, w = case.spec, 2048, case.spec.window
    k, _, q = vectors(case, total + 1)
    k = records.round_trip(k, "mxfp8", 1e-4)
    slot = torch.zeros(total + 1, dtype=torch.int32)
    at = torch.arange(total + 1)
    whole, replayed = (torch.full(spec.cache_shape(1), 0x7F, dtype=torch.uint8) for _ in range(2))
    swa.store(k[:total], None, whole, slot[:total], at[:total], spec=spec)
    first = total - w
    part = slice(first, total)
    start = torch.full((w,), first)
    out, lse = prefill_op(case)(q[part], k[part], None, replayed, slot[part], at[part], start, start.int(), None)
    assert out.isfinite().all() and lse.isfinite().all()
    swa.store(k[part], None, replayed, slot[part], at[part], spec=spec)
    last = slice(total, total + 1)
    for cache in (whole, replayed):
        swa.store(k[last], None, cache, slot[last], at[last], spec=spec)
    decode = [swa.attention(q[last], c, slot[last], at[last], spec=spec) for c in (whole, replayed)]
    assert_same(decode[1], decode[0])
    # the first replayed query sees itself alone
    torch.testing.assert_close(out[0, 0], k[first, 0], rtol=1e-2, atol=1e-2)


def test_bad_device_metadata_makes_a_padded_row() -> None:
    """F14: in the generated source; a start after the query, a slot too many, a q_start that points before the call."""
    case = BY_NAME["gpt-oss"]
    x = prefill_inputs(case)
    args = [x[n] for n in PREFILL_ARGS]
    code = generate_code(prefill_op(case), *args)
    clean = run_on_cpu(code, args)
    for name, value in (("state_ids", 4), ("positions", -7), ("valid_start", 10**6)):
        y = dict(x, **{name: x[name].clone()})
        y[name][0] = value
        out, lse = run_on_cpu(code, [y[n] for n in PREFILL_ARGS])
        assert_same(out[1:], clean[0][1:])
        assert not out[0].any() and (lse[0] == -math.inf).all()
    y = dict(x, q_starts=torch.zeros_like(x["q_starts"]))
    assert all(t.isfinite().all() for t in run_on_cpu(code, [y[n] for n in PREFILL_ARGS])[:1])


@pytest.mark.parametrize("name", ["gpt-oss", "v4"])
def test_a_start_that_no_sequence_has_stays_with_its_sequence(name: str) -> None:
    """F14: in the generated source; extremes neither wrap around nor keep a program busy."""
    case = BY_NAME[name]
    x = prefill_inputs(case, q_lens=(1, 7))
    args = [x[n] for n in PREFILL_ARGS]
    code = generate_code(prefill_op(case), *args)
    clean = run_on_cpu(code, args)
    for value in (-(2**63), 2**63 - 1):
        y = dict(x, q_starts=x["q_starts"].clone())
        y["q_starts"][1:8] = value
        for got, want in zip(run_on_cpu(code, [y[n] for n in PREFILL_ARGS]), clean, strict=True):
            assert not got.isnan().any()
            assert_same(got[:1], want[:1])
            assert_same(got[8:], want[8:])


def test_no_tokens() -> None:
    case = BY_NAME["v4"]
    x = prefill_inputs(case)
    empty = [t if n in ("cache", "sinks") or t is None else t[:0] for n, t in ((n, x[n]) for n in PREFILL_ARGS)]
    out, lse = prefill_op(case)(*empty)
    assert out.shape == (0, case.heads, 512) and lse.shape == (0, case.heads)


def test_a_number_of_tokens_that_data_decide() -> None:
    """Tokens picked by a mask inside the compiled function: nothing is known of their number."""
    case = BY_NAME["v4"]
    x = prefill_inputs(case)
    args, tokens = [x[n] for n in PREFILL_ARGS], len(x["q"])

    def picked(keep: torch.Tensor, *args: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        rows = keep.nonzero()[:, 0]
        return prefill_op(case)(*(a if a is None or len(a) != tokens else a[rows] for a in args))

    keep = torch.ones(tokens, dtype=torch.bool)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        code = generate_code(picked, keep, *args)
    assert judge(case, x, run_on_cpu(code, [keep, *args]), exact) > 0
