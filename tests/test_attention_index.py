"""swa_inductor::attention_index: keys named one by one, in a ring or any other buffer of records; merging two sides."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BY_NAME, CASES, Case, decode_inputs, index_op, template_launches, vectors
from numerics import assert_as_good_as, assert_same

import swa_inductor as swa
from swa_inductor import records, reference
from swa_inductor.testing import generate_code, run_on_cpu


def ring_index(case: Case, x: dict, extra: int = 3) -> torch.Tensor:
    """Index of the window of each query, int32 [T, W + extra]."""
    spec = case.spec
    lo, n = reference.visible_range(x["cache"], x["state_ids"], x["positions"], x["valid_start"], spec.window)
    column = torch.arange(spec.window + extra)
    flat = x["state_ids"][:, None].long() * spec.rows + (lo[:, None] + column) % spec.rows
    return torch.where(column < n[:, None], flat, -1).int()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_agrees_with_the_ring(case: Case) -> None:
    """An index buffer wider than the window does not widen it."""
    x = decode_inputs(case)
    args = (x["q"], x["cache"], ring_index(case, x), x["sinks"])
    spec = case.spec
    rest = (spec.head_dim**-0.5, spec.kv_format, spec.v_head_dim, case.softcap)
    want, want_lse = reference.attention(
        *(x[n] for n in ("q", "cache", "state_ids", "positions", "valid_start", "sinks")),
        spec.window,
        *rest,
        torch.float64,
    )
    exact, _ = reference.attention_index(*args, *rest, torch.float64)
    torch.testing.assert_close(exact, want, rtol=1e-9, atol=1e-12)
    plain, _ = reference.attention_index(*args, *rest, case.dtype)
    code = generate_code(index_op(case), *args)
    assert len(template_launches(code)) == len(code.launches) == 1
    live = x["state_ids"] >= 0
    for out, lse in (run_on_cpu(code, args), index_op(case)(*args)):
        assert not out[~live].any() and (lse[~live] == -math.inf).all()
        factor = 2.0 if case.dtype == torch.float32 else 1.0
        assert_as_good_as(out[live], want[live], plain[live].to(case.dtype), factor)
        torch.testing.assert_close(lse[live].double(), want_lse[live], rtol=1e-5, atol=2e-5)


def test_absent_rows_do_not_matter() -> None:
    """D8: row 0 of slot 0 holds NaN and -1 is not read as row 0; ids outside of the buffer count as absent."""
    case = BY_NAME["v4"]
    x = decode_inputs(case)
    index = torch.tensor([[5, -1, 7, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    q = x["q"][:2]
    cache = x["cache"].clone()
    cache[0, 0] = 0x7F
    far = index.clone()
    far[0, 1], far[0, 3] = case.slots * case.spec.rows, -(2**31)
    code = generate_code(index_op(case), q, x["cache"], index, None)
    clean = run_on_cpu(code, (q, x["cache"], index, None))
    for run in (lambda *a: run_on_cpu(code, a), index_op(case)):
        for args in ((q, cache, index, None), (q, cache, far, None)):
            out, lse = run(*args)
            torch.testing.assert_close(out, clean[0], rtol=1e-2, atol=1e-2)
            assert not out[1].any() and (lse[1] == -math.inf).all()


def test_merging_a_window_with_other_keys() -> None:
    """Two disjoint sets of keys, each attended to without the sink, merged with it: as one attention over all."""
    case = BY_NAME["fp32-mxfp8"]
    spec = case.spec
    x = decode_inputs(case)
    window = ring_index(case, x, extra=0)
    extra, _, _ = vectors(case, 50, seed=8)
    pool = records.encode_record(extra, None, spec.kv_format, 1e-4)[None]  # a buffer of one block of 50 records
    compressed = torch.randint(0, 50, (len(window), 9), dtype=torch.int32)
    compressed[3] = -1
    sinks = torch.randn(case.heads)
    a = swa.attention_index(x["q"], x["cache"], window, kv_format=spec.kv_format, return_lse=True)
    b = swa.attention_index(x["q"], pool, compressed, kv_format=spec.kv_format, return_lse=True)
    out, lse = swa.merge_attention(*a, *b, sinks)
    both = torch.cat([x["cache"].flatten(0, 1), pool[0]])[None]
    index = torch.cat([window, torch.where(compressed >= 0, compressed + case.slots * spec.rows, -1)], 1)
    want, want_lse = swa.attention_index(x["q"], both, index, kv_format=spec.kv_format, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_merging_nothing() -> None:
    """E8: neither side has a key: 0 and -inf, with and without a sink; one side alone is that side."""
    out, lse = torch.zeros(2, 3, 8), torch.full((2, 3), -math.inf)
    for sinks in (None, torch.zeros(3)):
        merged, merged_lse = swa.merge_attention(out, lse, out, lse, sinks)
        assert not merged.any() and (merged_lse == -math.inf).all()
    one, one_lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    merged, merged_lse = swa.merge_attention(one, one_lse, out, lse)
    torch.testing.assert_close(merged, one)
    assert_same(merged_lse, one_lse)
