"""swa_inductor::attention: the rules of the window, and the generated sm_90 source against fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from cases import (
    ATTENTION_ARGS,
    BF16,
    BY_NAME,
    CASES,
    FUSED_CASES,
    QUERY_ARGS,
    Case,
    attention_op,
    decode_inputs,
    filled_cache,
    has_constants,
    judge,
    query_composed,
    steps,
    template_launches,
    vectors,
)
from numerics import assert_as_good_as, assert_same
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor import records, reference
from swa_inductor.lowerings import _attend, _inductor
from swa_inductor.lowerings import attention as lowering
from swa_inductor.lowerings._attend import resident, slices
from swa_inductor.reference_query import PLAIN
from swa_inductor.testing import generate_code, run_on_cpu

every_case = pytest.mark.parametrize("case", CASES + FUSED_CASES, ids=lambda c: c.name)


def exact(
    case: Case, x: dict, dtype: torch.dtype = torch.float64, inner: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the dtype `inner`, norm and RoPE around it each rounded to `dtype`."""
    spec = case.spec
    rest = (spec.window, spec.head_dim**-0.5, spec.kv_format, spec.v_head_dim, case.softcap, inner or dtype)
    inputs = [x[name] for name in ATTENTION_ARGS[1 : -len(QUERY_ARGS)]]
    return query_composed(case, x, dtype, lambda q: reference.attention(q, *inputs, *rest))


def turned_by_hand(case: Case, x: dict, t: int, vector: torch.Tensor, sign: int) -> torch.Tensor:
    """RoPE of one vector, pair by pair, as a product of complex numbers."""
    out, half = vector.clone(), case.rope_dim // 2
    for i in range(half):
        first = len(vector) - case.rope_dim
        a, b = (first + i, first + i + half) if case.halves else (first + 2 * i, first + 2 * i + 1)
        cos, sin = (float(y) for y in x["rope"][x["positions"][t], i::half])
        z = complex(vector[a], vector[b]) * complex(cos, sign * sin)
        out[a], out[b] = z.real, z.imag
    return out


def by_hand(case: Case, x: dict, t: int, h: int) -> tuple[torch.Tensor, float]:
    """The formula of one query and one head, key by key, in fp64: a second opinion on reference.attention."""
    spec, slot, p = case.spec, int(x["state_ids"][t]), int(x["positions"][t])
    start = 0 if x["valid_start"] is None else int(x["valid_start"][t])
    lo = max(p - spec.window + 1, start, 0)
    scores, values = [], []
    q = x["q"][t, h].double()
    if case.q_norm:
        weight = 1 if x["q_norm_weight"] is None else x["q_norm_weight"].double()
        q = q * (q.square().mean() + 1e-5) ** -0.5 * weight
    q = turned_by_hand(case, x, t, q, 1)
    for j in range(lo, p + 1):
        record = x["cache"][slot, j % spec.rows, h // (case.heads // spec.num_kv_heads)]
        k, v = records.decode_record(record, spec.kv_format, spec.head_dim, spec.v_head_dim)
        s = float(q @ k.double()) * spec.head_dim**-0.5
        scores.append(s if case.softcap is None else case.softcap * math.tanh(s / case.softcap))
        values.append(v.double())
    weights = torch.tensor(scores, dtype=torch.float64).exp()
    total = weights.sum() + (0 if x["sinks"] is None else math.exp(float(x["sinks"][h])))
    out = (weights[:, None] * torch.stack(values)).sum(0) / total
    return turned_by_hand(case, x, t, out, -1) if case.inverse else out, math.log(float(weights.sum()))


@every_case
def test_reference_is_the_formula(case: Case) -> None:
    x = decode_inputs(case)
    out, lse = exact(case, x)
    for t in (0, len(out) // 3, len(out) - 1):
        if x["state_ids"][t] >= 0:
            o, ell = by_hand(case, x, t, case.heads - 1)
            torch.testing.assert_close(out[t, -1], o, rtol=1e-9, atol=1e-12)
            assert abs(float(lse[t, -1]) - ell) < 1e-9


@every_case
def test_generated_source(case: Case) -> None:
    """The kernel that an sm_90 GPU would run, executed: right against fp64, pad rows 0 and -inf.

    E6: with dims of 96 and 192, values of 128 beside keys of 192, groups of 3 heads, windows from 1 to 512.
    """
    x = decode_inputs(case)
    args = [x[name] for name in ATTENTION_ARGS]
    code = generate_code(attention_op(case), *args)
    assert len(template_launches(code)) == 1
    assert judge(case, x, run_on_cpu(code, args), exact) > 0


@every_case
def test_eager(case: Case) -> None:
    x = decode_inputs(case)
    assert judge(case, x, attention_op(case)(*(x[name] for name in ATTENTION_ARGS)), exact) > 0


@pytest.mark.parametrize("name", ["v4", "gpt-oss", "mimo", "narrow-v", "mha-fp16"])
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_rows_that_are_not_visible_do_not_matter(name: str, poison: int) -> None:
    """Every row outside the window of every query, and every padded query, holds NaN codes (D8, A13, A15)."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    spec = case.spec
    visible = torch.zeros(case.slots, spec.rows, dtype=torch.bool)
    lo, n = reference.visible_range(x["cache"], x["state_ids"], x["positions"], x["valid_start"], spec.window)
    for t in range(len(n)):
        for j in range(int(n[t])):
            visible[x["state_ids"][t], (int(lo[t]) + j) % spec.rows] = True
    poisoned = dict(x, cache=torch.where(visible[..., None, None], x["cache"], poison), q=x["q"].clone())
    poisoned["q"][x["state_ids"] < 0] = math.nan
    code = generate_code(attention_op(case), *(x[name] for name in ATTENTION_ARGS))
    for run in (lambda *a: run_on_cpu(code, a), attention_op(case)):
        for clean, other in zip(
            run(*(x[n] for n in ATTENTION_ARGS)), run(*(poisoned[n] for n in ATTENTION_ARGS)), strict=True
        ):
            assert_same(other, clean)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["v4", "v4-tight-ring", "narrow-v"])
def test_draft_rows_do_not_leak_between_tokens_of_a_step(name: str, value: float) -> None:
    """A record that is not finite, at the last position of a step, reaches only the query that sees it.

    One program serves them all, with the window kept in shared memory (v4) and tile by tile.
    """
    case = BY_NAME[name]
    d = case.spec.tokens_per_step
    state_ids, positions = steps(case, [300], [1])
    _, _, q = vectors(case, d)
    cache = filled_cache(case)
    args = (q, cache, state_ids, positions, None, None)
    code = generate_code(attention_op(case, return_lse=False), *args)
    clean, *_ = run_on_cpu(code, args)
    k, v, _ = vectors(case, 1)
    bad = (k, k.new_full(v.shape, value)) if v is not None else (k.new_full(k.shape, value), None)
    swa.store(*bad, cache, state_ids[-1:], positions[-1:], spec=case.spec)
    for out in (run_on_cpu(code, args)[0], attention_op(case, return_lse=False)(*args)):
        assert not out[-1].isfinite().any() and out[:-1].isfinite().all()
    assert_same(run_on_cpu(code, args)[0][:-1], clean[:-1])


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
@pytest.mark.parametrize("queries", [1, 7])
def test_eager_code_takes_queries_in_chunks(name: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the keys of many queries need not be in memory at once; by default these are one chunk."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    spec = case.spec
    assert len(x["q"]) % 7 and len(set(x["state_ids"].tolist())) > 1
    want = attention_op(case)(*(x[n] for n in ATTENTION_ARGS))
    values = spec.window * spec.num_kv_heads * max(spec.head_dim, spec.output_head_dim)
    monkeypatch.setattr(reference, "_CHUNK_VALUES", queries * values)
    for value, expected in zip(attention_op(case)(*(x[n] for n in ATTENTION_ARGS)), want, strict=True):
        torch.testing.assert_close(value, expected)


def test_window_counts_the_query_itself() -> None:
    """A3: a key that dominates is seen W - 1 positions later and no further."""
    case = BY_NAME["v4"]
    spec = case.spec
    cache = torch.zeros(spec.cache_shape(1), dtype=torch.uint8)
    k = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    k[..., 0] = 64.0
    slot = torch.zeros(1, dtype=torch.int32)
    swa.store(k, None, cache, slot, torch.tensor([873]), spec=spec)
    q = torch.full((1, 1, 512), 64.0, dtype=torch.bfloat16)
    for p, seen in ((1000, True), (1001, False)):
        out = swa.attention(q, cache, slot, torch.tensor([p]), spec=spec)
        assert (abs(float(out[0, 0, 0]) - 64.0) < 0.5) == seen


def test_warm_up_rows_take_no_weight() -> None:
    """A15: with 6 tokens present the 122 empty rows of the window do not flatten the softmax."""
    spec = swa.RingSpec(128, 1, 64, kv_format="fp32")
    cache = torch.zeros(spec.cache_shape(1), dtype=torch.uint8)
    k = torch.zeros(6, 1, 64)
    k[..., 0] = -10.0
    v = torch.arange(6.0)[:, None, None].expand(6, 1, 64)
    slot = torch.zeros(6, dtype=torch.int32)
    swa.store(k, v, cache, slot, torch.arange(6), spec=spec)
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 1.0
    out = swa.attention(q, cache, slot[:1], torch.tensor([5]), spec=spec, scale=1.0)
    torch.testing.assert_close(out, torch.full_like(out, 2.5))


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_a_step_equals_its_tokens_one_by_one(name: str) -> None:
    """A19: six tokens in one step read the same windows as six single steps over the same rows."""
    case = BY_NAME[name]
    state_ids, positions = steps(case, [1000], [0])
    _, _, q = vectors(case, len(state_ids))
    cache = filled_cache(case)
    together = attention_op(case, return_lse=False)(q, cache, state_ids, positions, None, None)
    single = attention_op(case, return_lse=False, tokens_per_step=1)
    for t in range(len(q)):
        alone = single(q[t : t + 1], cache, state_ids[t : t + 1], positions[t : t + 1], None, None)
        torch.testing.assert_close(together[t : t + 1], alone, rtol=0, atol=0)


def test_no_visible_key() -> None:
    """Padded row, with and without a sink: exactly 0 and -inf (A20, D7)."""
    case = BY_NAME["v4"]
    _, _, q = vectors(case, 6)
    args = (q, filled_cache(case), torch.full((6,), -1, dtype=torch.int32), torch.full((6,), -1), None, torch.zeros(8))
    code = generate_code(attention_op(case), *args)
    for out, lse in (run_on_cpu(code, args), attention_op(case)(*args)):
        assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("bad", ["slot", "position", "valid_start"])
def test_bad_device_metadata_makes_a_padded_row(bad: str) -> None:
    """F14: what a host check would refuse, the kernel reads as a padded row; other sequences are untouched."""
    case = BY_NAME["gpt-oss"]
    x = decode_inputs(case)
    code = generate_code(attention_op(case), *(x[n] for n in ATTENTION_ARGS))
    clean = run_on_cpu(code, [x[n] for n in ATTENTION_ARGS])
    d = case.spec.tokens_per_step
    y = {n: None if x[n] is None else x[n].clone() for n in ATTENTION_ARGS}
    if bad == "slot":
        y["state_ids"][:d] = case.slots
    elif bad == "position":
        y["positions"][:d] = -5
    else:
        y["valid_start"][:d] = 1 << 20
    for value, was in zip(run_on_cpu(code, [y[n] for n in ATTENTION_ARGS]), clean, strict=True):
        assert_same(value[d:], was[d:])
        assert not value[:d].isnan().any() and ((value[:d] == 0) | (value[:d] == -math.inf)).all()


def test_strided_cache_is_read_by_its_strides() -> None:
    """B11: a layer's view into a bigger state buffer, not contiguous, with a storage offset."""
    spec = swa.RingSpec(128, 6, 512, shared_kv=True)
    case = Case("view", spec, 4, slots=4)
    x = decode_inputs(case)
    state = torch.randint(0, 256, (4, 200_000), dtype=torch.uint8)
    view = state[:, 70_752 : 70_752 + spec.ring_bytes].view(spec.cache_shape(4))
    view.copy_(x["cache"])
    y = dict(x, cache=view)
    code = generate_code(attention_op(case), *(y[n] for n in ATTENTION_ARGS))
    contiguous = attention_op(case)(*(x[n] for n in ATTENTION_ARGS))
    for value, want in zip(run_on_cpu(code, [y[n] for n in ATTENTION_ARGS]), contiguous, strict=True):
        torch.testing.assert_close(value, want, rtol=2e-2, atol=2e-2)


def test_epilogue_fuses_behind_attention() -> None:
    """A gate behind attention is part of its kernel: one launch, no intermediate."""
    case = BY_NAME["gemma3"]
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    gate = torch.randn_like(x["q"])

    def gated(gate: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return attention_op(case, return_lse=False)(*args) * torch.sigmoid(gate)

    code = generate_code(gated, gate, *args)
    FileCheck().check_count("triton_tem", 1, exactly=True).check_not("extern_kernels").run(code.call)
    assert len(template_launches(code)) == 1
    assert [a.dtype for a in code.allocations].count("torch.bfloat16") == 1  # the result, and nothing before it
    out, *_ = run_on_cpu(code, [gate, *args])
    torch.testing.assert_close(out, gated(gate, *args), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["v4+-few-heads", "v4+-one-token", "gemma3+", "mimo+"])
def test_epilogue_fuses_behind_inverse_rope(name: str) -> None:
    """Gate, residual and cast see the output that has been turned back; slices of other widths, tiles, separate V."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    gate = torch.randn(len(x["q"]), case.heads, case.spec.output_head_dim).to(case.dtype)

    def fn(gate: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return (attention_op(case, return_lse=False)(*args) * torch.sigmoid(gate) + gate).float()

    code = generate_code(fn, gate, *args)
    assert len(template_launches(code)) == 1 and len(code.launches) <= 2 and "extern_kernels" not in code.call
    assert "torch.bfloat16" not in [a.dtype for a in code.allocations]
    out, *_ = run_on_cpu(code, [gate, *args])
    torch.testing.assert_close(out, fn(gate, *args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("layer", ["v4+", "v4+-one-token"])
def test_one_kernel_between_two_products(layer: str, capability: tuple[int, int]) -> None:
    """q_b GEMM, one kernel, grouped output GEMM: norm, RoPE and inverse RoPE are in it."""
    case = BY_NAME[layer]
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS[1:]]
    tokens, width = len(x["q"]), case.heads * 512
    q_a, q_b = torch.randn(tokens, 128, dtype=BF16), torch.randn(128, width, dtype=BF16)
    o_a = torch.randn(2, width // 2, 64, dtype=BF16)

    def fn(q_a: torch.Tensor, q_b: torch.Tensor, o_a: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        out = attention_op(case, return_lse=False)((q_a @ q_b).view(tokens, case.heads, 512), *args)
        return torch.bmm(out.view(tokens, 2, -1).transpose(0, 1), o_a)

    code = generate_code(fn, q_a, q_b, o_a, *args, capability=capability)
    check = FileCheck().check_count("extern_kernels.mm(", 1, exactly=True).check("triton_tem_fused_attention")
    check.check_count("extern_kernels.bmm(", 1, exactly=True).run(code.call)
    assert len(code.launches) == len(template_launches(code)) == 1


def test_a_position_beyond_the_table_makes_a_padded_row() -> None:
    """In the resident kernel and tile by tile; rows before it are what they were."""
    for name in ("v4+-one-token", "v4+-few-heads", "gpt-oss+"):
        case = BY_NAME[name]
        x = decode_inputs(case)
        args = [x[n] for n in ATTENTION_ARGS]
        short = [*args[:-1], x["rope"][:-1].clone()]  # the last position of all, that of the last row, is beyond
        code = generate_code(attention_op(case), *short)
        for run in (lambda *a, code=code: run_on_cpu(code, a), attention_op(case)):
            out, lse = run(*short)
            assert not out[-1].any() and (lse[-1] == -math.inf).all()
            for value, want in zip((out, lse), attention_op(case)(*args), strict=True):
                torch.testing.assert_close(value[:-1], want[:-1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["v4+-one-token", "v4+-few-heads", "gpt-oss+", "fp32+"])
def test_nan_in_q_stays_in_its_row(name: str) -> None:
    """Of a visible row all of the output, of a padded row nothing."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    code = generate_code(attention_op(case), *args)
    clean = run_on_cpu(code, args)
    bad = x["q"].clone()
    bad[0, 1, 3] = math.nan
    bad[x["state_ids"] < 0] = math.nan
    out, lse = run_on_cpu(code, [bad, *args[1:]])
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    keep = torch.ones(lse.shape, dtype=torch.bool)
    keep[0, 1] = False
    assert_same(out[keep], clean[0][keep])
    assert_same(lse[keep], clean[1][keep])


def test_layout_change_behind_attention_is_right() -> None:
    """E1, E2: an epilogue that permutes or has two readers, behind a q that is looked up, is right, fused or not."""
    case = BY_NAME["gemma3"]
    x = decode_inputs(case)
    args = [torch.arange(len(x["q"])).flip(0), *(x[n] for n in ATTENTION_ARGS)]

    def fn(rows: torch.Tensor, q: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = attention_op(case, return_lse=False)(q[rows], *args)
        return out.transpose(0, 1).contiguous() * 2, out.view(len(out), -1).float()

    code = generate_code(fn, *args)
    for value, want in zip(run_on_cpu(code, args), fn(*args), strict=True):
        torch.testing.assert_close(value, want, rtol=2e-2, atol=1e-2)


def test_q_may_be_a_transposed_view() -> None:
    case = BY_NAME["gpt-oss"]
    x = decode_inputs(case)
    x["q"] = x["q"].transpose(0, 1).contiguous().transpose(0, 1)
    args = [x[n] for n in ATTENTION_ARGS]
    out, _ = run_on_cpu(generate_code(attention_op(case), *args), args)
    want, _ = exact(case, x)
    plain, _ = exact(case, x, case.dtype)
    assert_as_good_as(out, want, plain.to(case.dtype))


@pytest.mark.parametrize("name", ["gemma3", "v4-tight-ring", "gemma3-fp32", "wide-v", "v4+-few-heads", "gpt-oss+"])
def test_programs_that_share_keys_agree_with_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E8: a small batch splits the keys of a row over programs; shares without a visible key change nothing."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    results = []
    for shares in (1, 2, 5, 8):
        monkeypatch.setattr(lowering, "splits", lambda *_, shares=shares: shares)
        code = generate_code(attention_op(case), *args)
        results.append(run_on_cpu(code, args))
        live = x["state_ids"] >= 0
        assert not results[-1][0][~live].any() and (results[-1][1][~live] == -math.inf).all()
        torch.testing.assert_close(results[-1][0], results[0][0], rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(results[-1][1], results[0][1], rtol=1e-5, atol=1e-5)


def test_how_many_programs_share_keys() -> None:
    """A small batch fills the GPU, a large one is not split, and an unknown one neither."""
    assert lowering.splits(1, 512, 32, 132) == 8
    assert lowering.splits(12, 133, 16, 132) == 4
    assert lowering.splits(100, 512, 32, 132) == 2
    assert lowering.splits(200, 512, 32, 132) == 1
    assert lowering.splits(None, 512, 32, 132) == 1
    assert lowering.splits(1, 40, 32, 132) == 1


def test_a_share_of_two_tiles_is_one() -> None:
    options = {"BLOCK_M": 16, "BLOCK_N": 32, "num_stages": 3}
    joined = options | {"BLOCK_N": 64, "num_stages": 2}
    assert lowering.whole_share(options, 512, 8) == lowering.whole_share(options, 128, 2) == joined
    assert lowering.whole_share(options | {"num_stages": 2}, 128, 2) == joined
    for other, keys, shares in (
        (options, 129, 2),
        (options, 64, 1),
        (options | {"BLOCK_M": 32}, 128, 2),
        (options | {"num_stages": 1}, 128, 2),
    ):
        assert lowering.whole_share(other, keys, shares) == other


def test_rows_of_a_program_that_keeps_its_window() -> None:
    assert [lowering.resident_rows(rows, None, 132) for rows in (1, 64, 65)] == [64, 64, 128]
    assert [lowering.resident_rows(96, steps, 132) for steps in (0, 66, 67)] == [64, 64, 128]


@pytest.mark.parametrize("block_m", [64, 128])
def test_tokens_that_have_rows_in_a_program(block_m: int) -> None:
    """Against the rows themselves, of steps that are long enough; short ones have no more than their tokens."""
    for groups in range(1, 2 * block_m + 1):
        rows = torch.arange(block_m * groups).view(-1, block_m)  # programs until they start with a token again
        most = int((rows[:, -1] // groups - rows[:, 0] // groups).max()) + 1
        held = lowering.tokens_in(block_m, groups, block_m)
        assert held == most if block_m % groups == 0 or groups % block_m == 0 else most <= held <= most + 1
        assert lowering.tokens_in(block_m, groups, 3) == min(held, 3)


@pytest.mark.parametrize("tokens", ["known", "unknown"])
@pytest.mark.parametrize(
    "case",
    [
        Case("64 heads", swa.RingSpec(128, 6, 512, shared_kv=True), 64, sinks=True, valid_start=True),
        Case("odd", swa.RingSpec(70, 5, 128, shared_kv=True, kv_format="fp16"), 2 * 24, torch.float16, softcap=30.0),
    ],
    ids=lambda c: c.name,
)
def test_programs_that_keep_the_whole_window(case: Case, tokens: str) -> None:
    """64 rows a program where few tokens are known to come, else 128."""
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    dynamic = [ATTENTION_ARGS.index(n) for n in ("q", "state_ids", "positions", "valid_start") if x[n] is not None]
    code = generate_code(attention_op(case), *args, dynamic_inputs=dynamic if tokens == "unknown" else ())
    (kernel,) = (k for k in code.kernels if "attention" in k)
    block_m, tiles = (64, (128,)) if tokens == "known" else (128, (64, 64, 16) if case.heads == 64 else (64, 16))
    assert has_constants(code.kernel_source(kernel), BLOCK_M=block_m, TILES=tiles)
    assert judge(case, x, run_on_cpu(code, args), exact) > 0


@pytest.mark.parametrize(
    ("heads", "spec"),
    [(32, swa.RingSpec(70, 1, 128, shared_kv=True)), (66, swa.RingSpec(70, 1, 128, kv_format="bf16"))],
    ids=["few rows", "K and V"],
)
def test_no_window_is_kept_for(heads: int, spec: swa.RingSpec) -> None:
    case = Case("", spec, heads)
    x = decode_inputs(case)
    code = generate_code(attention_op(case), *(x[n] for n in ATTENTION_ARGS))
    assert has_constants(code.source, TILES=())


def test_a_window_is_kept_only_where_it_fits() -> None:
    h200, ada, a100, rtx = (
        SimpleNamespace(major=major, shared_memory_per_block_optin=kb * 1024)
        for major, kb in ((9, 227), (8, 99), (8, 163), (12, 99))
    )
    assert resident(64, 1, 512, 128, BF16, h200, PLAIN)["TILES"] == (128,)
    assert resident(128, 2, 512, 128, BF16, h200, PLAIN)["TILES"] == (64, 64, 16)
    for card, dim, window, dtype in (
        (ada, 512, 128, BF16),
        (a100, 512, 128, BF16),
        (a100, 128, 128, BF16),  # mma.sync: operands lie in registers
        (rtx, 128, 128, BF16),
        (h200, 512, 256, BF16),
        (h200, 192, 128, BF16),
        (h200, 512, 128, torch.float32),
    ):
        assert resident(64, 1, dim, window, dtype, card, PLAIN) is None
    # Two bytes for each value of the window and of a slice of q.
    for block_m, tokens, dim, window, columns, keys in ((64, 1, 512, 128, 128, 128), (128, 2, 512, 128, 256, 144)):
        values = keys * dim + block_m * columns
        for spare in (0, -1):
            card = SimpleNamespace(major=9, shared_memory_per_block_optin=2 * values + spare)
            assert (resident(block_m, tokens, dim, window, BF16, card, PLAIN) is None) == (spare < 0)


def test_tiles() -> None:
    """Those of sm_90 were timed; where operands lie in registers (mma.sync), tiles are smaller (portability.py)."""
    h200, rtx = SimpleNamespace(major=9), SimpleNamespace(major=12)

    def tiles(config: dict[str, int]) -> tuple[int, ...]:
        return tuple(config[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))

    for rows, widest, dtype, keys, timed, small in (
        (384, 512, BF16, 133, (32, 16, 8, 1), (32, 16, 8, 1)),
        (8, 512, BF16, 133, (16, 16, 8, 1), (16, 16, 8, 1)),
        (96, 256, BF16, 69, (64, 32, 8, 1), (32, 32, 4, 2)),
        (24, 256, BF16, 69, (32, 32, 4, 2), (32, 32, 4, 2)),
        (2, 256, BF16, 1024, (16, 32, 4, 3), (16, 32, 4, 3)),
        (120, 128, BF16, 74, (64, 64, 4, 2), (32, 32, 4, 2)),
        (120, 64, BF16, 128, (64, 64, 4, 2), (64, 64, 4, 2)),
        (8, 64, BF16, 128, (16, 128, 4, 1), (16, 128, 4, 1)),
        (8, 64, BF16, 129, (16, 64, 4, 2), (16, 64, 4, 2)),
        (8, 64, BF16, 64, (16, 64, 4, 2), (16, 64, 4, 2)),
        (384, 512, torch.float32, 133, (16, 16, 16, 1), (16, 16, 16, 1)),
        (384, 256, torch.float32, 133, (16, 16, 8, 1), (16, 16, 8, 1)),
        (384, 128, torch.float32, 133, (16, 16, 4, 1), (16, 16, 4, 1)),
        (384, 64, torch.float32, 128, (16, 32, 4, 1), (16, 32, 4, 1)),
    ):
        for card, want in ((h200, timed), (rtx, small)):
            assert tiles(_attend.config(rows, widest, dtype, card, keys)) == want
    for widest, dtype, want in (
        (512, BF16, (32, 16, 8, 1)),
        (256, BF16, (64, 16, 8, 1)),
        (128, BF16, (64, 32, 4, 2)),
        (128, torch.float32, (16, 16, 4, 1)),
        (64, torch.float32, (16, 32, 4, 1)),
    ):
        assert tiles(_attend.prefill_config(widest, dtype, h200)) == want
    assert [tuple(v.values()) for v in _attend.variants({"BLOCK_N": 16, "num_warps": 16, "num_stages": 1})] == [
        (16, 16, 2),
        (32, 16, 1),
    ]
    assert [tuple(v.values()) for v in _attend.variants({"BLOCK_N": 32, "num_warps": 8, "num_stages": 2})] == [
        (32, 8, 3),
        (64, 8, 2),
        (64, 16, 2),
        (32, 16, 2),
        (16, 8, 3),
    ]
    assert list(_attend.variants({"BLOCK_N": 16, "num_warps": 16, "num_stages": 1})[0]) == [
        "BLOCK_N",
        "num_warps",
        "num_stages",
    ]
    assert _attend.token_tiles(24, 16) == {"HEADS": 16, "BLOCK_T": 1, "HEAD_BLOCKS": 2, "G": 24}
    assert _attend.token_tiles(5, 64) == {"HEADS": 8, "BLOCK_T": 8, "HEAD_BLOCKS": 1, "G": 5}


def test_dims_that_rope_turns_are_a_slice_of_their_own() -> None:
    assert slices(512, 256, 0) == ((0, 2, 256),)
    assert slices(512, 256, 64) == ((0, 1, 256), (256, 1, 128), (384, 1, 64), (448, 1, 64))
    assert slices(512, 128, 64) == ((0, 3, 128), (384, 1, 64), (448, 1, 64))
    assert slices(128, 128, 128) == ((0, 1, 128),)


def test_max_autotune_tries_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tiles for the same grid, timed on metadata under which the kernel has work; else there is one choice."""
    case, seen = BY_NAME["gpt-oss"], []
    select = _inductor.autotune_select_algorithm

    def record(name: str, choices: list, nodes: list, layout: object, input_gen_fns: dict) -> object:
        seen.append((choices, {i: make.args[0]([20], torch.device("cpu")) for i, make in input_gen_fns.items()}))
        return select(name, choices, nodes, layout, input_gen_fns=input_gen_fns)

    monkeypatch.setattr(_inductor, "autotune_select_algorithm", record)
    x = decode_inputs(case)
    args = [x[n] for n in ATTENTION_ARGS]
    codes = [generate_code(attention_op(case), *args, options={"max_autotune": on}) for on in (False, True)]
    (one, _), (more, examples) = seen
    assert len(one) == 1 and len(more) == 1 + len(
        _attend.variants(_attend.config(32, 64, BF16, SimpleNamespace(major=9)))
    )
    assert len({str(choice.description) for choice in more}) == len(more)
    assert all("BLOCK_M=32" in choice.description for choice in more)
    ids, at = (examples[i] for i in (2, 3))
    assert ids.dtype == torch.int32 and at.dtype == torch.int64 and ids.shape == at.shape == x["state_ids"].shape
    assert ids.tolist() == [i // 4 % case.slots for i in range(len(ids))]
    assert at.tolist() == [case.spec.window + i % 4 for i in range(len(ids))]
    assert codes[0].kernels == codes[1].kernels and codes[0].call == codes[1].call  # where nothing can be timed
