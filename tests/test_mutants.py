"""Mutants: known mistakes, put in on purpose: a check passes as the code is, and fails with the mistake.

What the checks are good for: a suite that a mutant passes would not have found that mistake.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import test_structure
import torch
from cases import (
    ATTENTION_ARGS,
    EPS,
    FP32,
    GATHER_ARGS,
    NORM_STORE_ARGS,
    PREFILL_ARGS,
    STORE_ARGS,
    Case,
    attention_op,
    decode_inputs,
    gather_op,
    norm_inputs,
    norm_store_op,
    prefill_inputs,
    prefill_op,
    store_op,
)
from test_attention import exact as attention_exact
from test_attention_prefill import exact as prefill_exact
from test_gather import plain as plain_gather
from test_norm_store import stored
from test_oracle import Ops, _one_thread, functions, run_schedule  # noqa: F401
from test_store import plain_store

import swa_inductor as swa
from swa_inductor import lowerings, records, reference_inline
from swa_inductor.lowerings import _inductor
from swa_inductor.lowerings._template import source
from swa_inductor.testing import GeneratedCode, generate_code, run_on_cpu

SMALL = Case("small", swa.RingSpec(20, 3, 64, kv_format="mxfp8"), 2)
STARTING = replace(SMALL, valid_start=True)
NORMED = Case("normed", swa.RingSpec(20, 3, 64, kv_format="mxfp8"), 2, q_norm="weight", rope_dim=32, inverse=True)
HALVES = replace(NORMED, halves=True)
RESIDENT = Case("resident", swa.RingSpec(20, 3, 128, shared_kv=True), 24, q_norm="plain", rope_dim=32, inverse=True)
WIDE_RING = swa.RingSpec(5, 3, 128, shared_kv=True, ring_rows=12)
TEMPLATES = sorted((Path(swa.__file__).parent / "templates").glob("*.jinja"))
number = itertools.count()
Code = Callable[[Callable, list], GeneratedCode]


def fails(check: Callable[..., None], *args: object) -> bool:
    try:
        check(*args)
    except AssertionError:  # anything else is a mistake of the test
        return True
    return False


# ---------------------------------------------------------------------------------------------------- reference


def schedules(case: Case, ops: Ops | None = None) -> int:
    return sum(run_schedule(seed, case, ops) for seed in range(30))


def test_the_schedules_pass() -> None:
    assert schedules(oracle_case()) > 30


def oracle_case(spec: swa.RingSpec = WIDE_RING) -> Case:
    return Case("oracle", spec, 2, FP32)


def test_a_ring_one_row_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: R = W + D - 2, with the capacity rule out of the way: the last draft takes the first query's oldest row."""
    schedules(oracle_case(replace(WIDE_RING, ring_rows=7)))
    for module in (swa.spec, swa.checks):
        monkeypatch.setattr(module, "require_capacity", lambda *_: None)
    assert fails(schedules, oracle_case(replace(WIDE_RING, ring_rows=6)))


@pytest.mark.parametrize(("rows", "right"), [(133, True), (132, False)])
def test_132_rows(monkeypatch: pytest.MonkeyPatch, rows: int, right: bool) -> None:
    """A9: at W = 128, D = 6, positions 1005 and 873 share row 81 of 132, and the query at 1000 sees 873."""
    for module in (swa.spec, swa.checks):
        monkeypatch.setattr(module, "require_capacity", lambda *_: None)
    spec = swa.RingSpec(128, 6, 32, shared_kv=True, kv_format="fp32", ring_rows=rows)
    cache = torch.zeros(spec.cache_shape(1), dtype=torch.uint8)
    at = torch.arange(1006)
    ids = torch.zeros(1006, dtype=torch.int32)
    for part in (slice(0, 1000), slice(1000, 1006)):
        swa.store(at[part, None, None].expand(-1, 1, 32).float(), None, cache, ids[part], at[part], spec=spec)
    out = swa.attention(torch.zeros(6, 1, 32), cache, ids[1000:], at[1000:], spec=spec, tokens_per_step=6)
    mean = at[1000:] - 63.5  # of the 128 positions that each query sees
    assert torch.allclose(out[:, 0, 0], mean.float(), rtol=0, atol=0.1) == right


@pytest.mark.parametrize("extra", [1, -1])
@pytest.mark.parametrize("name", ["attention", "attention_prefill", "decode_index", "plan"])
def test_window_off_by_one(name: str, extra: int) -> None:
    """A3: W + 1 and W - 1 keys, in each op that finds its keys by position."""
    visible_range, prefill_plan = reference_inline.visible_range, reference_inline.prefill_plan

    def shifted_plan(*args):  # noqa: ANN002, ANN202
        segments, pivots, *rest = prefill_plan(*args)
        start1, len1, start2, len2 = pivots.unbind(1)
        shift = torch.where((len1 > 0) & (len1 + len2 == WIDE_RING.window), extra, 0)
        return segments, torch.stack([start1 - shift, len1 + shift, start2, len2], 1).int(), *rest

    case = oracle_case()
    ops = functions(case)

    def mutant(*args):  # noqa: ANN002, ANN202
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference_inline, "visible_range", lambda *a: visible_range(*a[:-1], a[-1] + extra))
            patch.setattr(reference_inline, "prefill_plan", shifted_plan)
            return ops[name](*args)

    assert fails(schedules, case, {**ops, name: mutant})


def test_store_before_attending() -> None:
    """A4: a prefill chunk overwrites history that it still sees."""
    case = oracle_case()
    ops = functions(case)

    def store_first(q, k, v, cache, ids, at, *rest):  # noqa: ANN001, ANN002, ANN202
        ops["store"](k, v, cache, ids, at)
        return prefill_op(case)(q, k, v, cache, ids, at, *rest)

    assert fails(schedules, case, {**ops, "attention_prefill": store_first})


@pytest.mark.parametrize("new", [6, 7])
def test_store_before_gathering(new: int) -> None:
    """A4: the 7th new token takes the row of position 1920, the first of the workspace."""
    spec = swa.RingSpec(128, 6, 32, shared_kv=True)
    at = torch.arange(2048 + new)
    kv, ids = torch.randn(2048 + new, 1, 32), torch.zeros(2048 + new, dtype=torch.int32)

    def rows(order: tuple[str, str]) -> torch.Tensor:
        cache = torch.zeros(spec.cache_shape(1), dtype=torch.uint8)
        swa.store(kv[:2048], None, cache, ids[:2048], at[:2048], spec=spec)
        for step in order:
            if step == "store":
                swa.store(kv[2048:], None, cache, ids[2048:], at[2048:], spec=spec)
            else:
                got, _ = swa.gather(cache, ids[:1], at[2048:2049], spec=spec, dtype=FP32)
        return got

    want = records.round_trip(kv[1920:2048], "mxfp8", 1e-4)
    assert torch.equal(rows(("gather", "store")), want)
    assert torch.equal(rows(("store", "gather")), want) == (new < 7)


def check_scales() -> None:
    """B3: a block's maximum never saturates; 500 takes scale byte 128, 448 takes 127."""
    assert records.encode(torch.tensor([[500.0] * 32, [448.0] * 32]), "mxfp8", 1e-4)[:, 32].tolist() == [128, 127]
    x = torch.randn(64, 32) * torch.exp2(torch.arange(-8.0, 56.0))[:, None]
    error = (records.round_trip(x, "mxfp8", 1e-4) - x).abs().amax(1) / x.abs().amax(1)
    assert error.max() <= 1 / 16


def test_scales_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scales()
    right = records.block_scale

    def floor(x: torch.Tensor, min_amax: float) -> torch.Tensor:
        amax = x.abs().amax(-1, keepdim=True).clamp(min=min_amax)
        return torch.minimum(right(x, min_amax), (amax / 448).log2().floor().int() + 127)

    monkeypatch.setattr(records, "block_scale", floor)
    assert fails(check_scales)


# ---------------------------------------------------------------------------------------------------- templates


def strided(case: Case, x: dict) -> dict:
    """The inputs with the cache as a layer's view of a state, B11."""
    ring = x["cache"][0].numel()
    state = torch.zeros(case.slots, 3 * (ring + -ring % 32), dtype=torch.uint8)
    view = state[:, 32 : 32 + ring].view(x["cache"].shape)
    return dict(x, cache=view.copy_(x["cache"]))


def check_store(code_of: Code) -> None:
    x = strided(SMALL, decode_inputs(SMALL))
    want = x["cache"]._base.clone()
    view = want.as_strided(x["cache"].size(), x["cache"].stride(), x["cache"].storage_offset())
    plain_store(SMALL, x["k"], x["v"], view, x["state_ids"].tolist(), x["positions"].tolist())
    args = [x[n] for n in STORE_ARGS]
    run_on_cpu(code_of(store_op(SMALL), args), args)
    assert torch.equal(x["cache"]._base, want)


def check_norm_store(code_of: Code, interleaved: bool = True, rows: int | None = None) -> None:
    x = norm_inputs(SMALL, decode_inputs(SMALL), rope_dim=32, rows=rows)
    want_cache, want = stored(SMALL, x, interleaved)
    args = [x[n] for n in NORM_STORE_ARGS]
    (out,) = run_on_cpu(code_of(norm_store_op(SMALL, EPS, interleaved), args), args)
    assert torch.equal(out, want)
    assert torch.equal(x["cache"], want_cache)


def check_attention(code_of: Code, case: Case = SMALL, size: float = 1.0) -> None:
    x = strided(case, decode_inputs(case))
    x["q"] *= size
    args = [x[n] for n in ATTENTION_ARGS]
    judge(case, run_on_cpu(code_of(attention_op(case), args), args), attention_exact(case, x))


def check_prefill(code_of: Code, case: Case = SMALL) -> None:
    x = strided(case, prefill_inputs(case))
    args = [x[n] for n in PREFILL_ARGS]
    judge(case, run_on_cpu(code_of(prefill_op(case), args), args), prefill_exact(case, x))


def judge(case: Case, got: tuple, want: tuple) -> None:
    live = want[1] > -math.inf
    assert torch.allclose(got[1][live].double(), want[1][live], atol=1e-2 if case.q_norm else 1e-4)
    assert torch.allclose(got[0][live].double(), want[0][live], atol=2e-2)


def check_gather(code_of: Code) -> None:
    x = strided(SMALL, prefill_inputs(SMALL))
    args = [x[n] for n in GATHER_ARGS]
    got = run_on_cpu(code_of(gather_op(SMALL), args), args)
    assert all(torch.equal(value, want) for value, want in zip(got, plain_gather(SMALL, x), strict=True))


CONTIGUOUS = ('{{stride("CACHE", 0)}}', '({{size("CACHE", 1)}} * {{size("CACHE", 2)}} * {{size("CACHE", 3)}})')
WIDER, NARROWER = ("(WINDOW - 1)", "WINDOW"), ("(WINDOW - 1)", "(WINDOW - 2)")
NO_START = ('("VALID_START", 0)}}, mask=inside, other=0)', '("VALID_START", 0)}}, mask=inside & (token < 0), other=0)')
FUSED, FUSED_PREFILL, WHOLE = (
    ("attention", partial(check_attention, case=NORMED)),
    ("attention_prefill", partial(check_prefill, case=NORMED)),
    ("attention", partial(check_attention, case=RESIDENT)),
)
BACK = '"-" if inverse'
MUTANTS = {
    "W + 1": ("attention", check_attention, *WIDER),
    "W - 1": ("attention", check_attention, *NARROWER),
    "W + 1, prefill": ("attention_prefill", check_prefill, *WIDER),
    "W - 1, prefill": ("attention_prefill", check_prefill, *NARROWER),
    "no valid_start": ("attention", partial(check_attention, case=STARTING), *NO_START),
    "no valid_start, prefill": (
        "attention_prefill",
        partial(check_prefill, case=STARTING),
        *(text.replace("inside", "{{p}}inside").replace("token", "{{p}}token") for text in NO_START),
    ),
    "scales rounded down": ("store", check_store, "((amax & 0x7FFFFF) > 0x600000).to(tl.int32)", "0"),
    "RoPE turns back": ("norm_store", check_norm_store, "a * cos - b * sin", "a * cos + b * sin"),
    "halves turn back": (
        "norm_store",
        partial(check_norm_store, interleaved=False),
        "(upper, sin, -sin)",
        "(upper, -sin, sin)",
    ),
    "halves for pairs": (
        "norm_store",
        check_norm_store,
        "{%- if ROPE_INTERLEAVED %}",
        "{%- if not ROPE_INTERLEAVED %}",
    ),
    "RoPE of the first dims": ("norm_store", check_norm_store, "- {{(K_DIM - ROPE_DIM) // 2}}", "- 0"),
    "norm without eps": ("norm_store", check_norm_store, " + NORM_EPS)", ")"),
    "norm of x without eps": ("norm_store", check_norm_store, " + X_EPS)", ")"),
    "norm not rounded": ("norm_store", check_norm_store, "{{x}} = {{x}}.to(K.dtype.element_ty).to(tl.float32)", ""),
    "position beyond the table": (
        "norm_store",
        partial(check_norm_store, rows=20),
        'writes = writes & (position < {{size("ROPE", 0)}})',
        "",
    ),
    "contiguous, store": ("store", check_store, *CONTIGUOUS),
    "contiguous, attention": ("attention", check_attention, *CONTIGUOUS),
    "contiguous, prefill": ("attention_prefill", check_prefill, *CONTIGUOUS),
    "contiguous, gather": ("gather", check_gather, *CONTIGUOUS),
    "output turned on": (*FUSED, BACK, '"-" if False'),
    "q turned back": (*FUSED, BACK, '"-" if True'),
    "output turned on, prefill": (*FUSED_PREFILL, BACK, '"-" if False'),
    "output turned on, whole window": (*WHOLE, BACK, '"-" if False'),
    "halves turned back": ("attention", partial(check_attention, case=HALVES), "-sin, sin)", "sin, -sin)"),
    "halves paired with themselves": (
        "attention",
        partial(check_attention, case=HALVES),
        "{{half}}, -{{half}}), 0)",
        "0, 0), 0)",
    ),
    "pairs of the first dims": (*FUSED, "{{(dim - ROPE_DIM - first) // 2}}", "0"),
    "angles of the token's index": (*FUSED, "angle = ROPE + at", "angle = ROPE + token[:, None]"),
    "eps ignored": ("attention", partial(check_attention, case=NORMED, size=1e-3), " + {{Q_NORM_EPS}}", ""),
    "weight ignored": (*FUSED, "{{name}} *= tl.load(Q_NORM_WEIGHT", "weight = tl.load(Q_NORM_WEIGHT"),
    "norm twice": (*FUSED, "q = q * {{rstd()}}[:, None]", "q = q * {{rstd()}}[:, None] * {{rstd()}}[:, None]"),
    "norm twice, whole window": (*WHOLE, "rstd = {{rstd()}}", "rstd = {{rstd()}} * {{rstd()}}"),
    "norm of the last slice": (*WHOLE, "{{squares}} += ", "{{squares}} = "),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_kernel(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A3, A13, B3, B11 in the sm_90 source: passes, and fails with a template that has the mistake."""
    op, check, old, new = MUTANTS[what]
    text, lowering = source(op), getattr(lowerings, op)
    assert old in text
    check(generate)
    mutant = _inductor.triton_template(f"mutant_{next(number)}", lowering.grid, text.replace(old, new))
    monkeypatch.setattr(lowering, "TEMPLATE", mutant)
    assert fails(check, generate)


def generate(fn: Callable, args: list) -> GeneratedCode:
    return generate_code(fn, *args)


@pytest.mark.parametrize("path", [p for p in TEMPLATES if 'stride("CACHE"' in p.read_text()], ids=lambda p: p.name)
def test_offsets_in_32_bits(tmp_path: Path, path: Path) -> None:
    """A17: what no small tensor shows, the rule about the text does."""
    check = test_structure.test_offsets_are_64_bit_before_they_are_multiplied
    check(path)
    mutant = tmp_path / path.name
    mutant.write_text(
        re.sub(r"slot\.to\([tg]l\.int64\)", "slot", path.read_text()).replace("// R).to(tl.int64)", "// N)")
    )
    assert mutant.read_text() != path.read_text() and fails(check, mutant)
