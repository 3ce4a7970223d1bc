"""Inputs of the op tests: one seeded builder, and the grid of geometries that every test of an op walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from numerics import assert_as_good_as
from torch import Tensor

import swa_inductor as swa
from swa_inductor import records
from swa_inductor.lowerings import _inductor
from swa_inductor.reference_rope import rms_norm, rotate
from swa_inductor.testing import GeneratedCode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A geometry: the ring, the query heads, the dtype of the vectors, and the optional inputs of attention."""

    name: str
    spec: swa.RingSpec
    heads: int
    dtype: torch.dtype = BF16
    sinks: bool = False
    valid_start: bool = False
    softcap: float | None = None
    slots: int = 4
    q_norm: str | None = None
    """RMSNorm of q: "plain" or "weight"."""
    rope_dim: int = 0
    halves: bool = False
    inverse: bool = False


def _spec(window: int, step: int, dim: int, **kw: object) -> swa.RingSpec:
    return swa.RingSpec(window, step, dim, **kw)  # type: ignore[arg-type]


CASES = [
    Case("v4", _spec(128, 6, 512, shared_kv=True), 8, sinks=True),
    Case("v4-tight-ring", _spec(128, 6, 512, shared_kv=True, ring_rows=133), 5),
    Case("gemma3", _spec(512, 1, 256, kv_format="bf16"), 4),
    Case("gemma3-fp32", _spec(64, 2, 256, kv_format="fp32"), 4, FP32),
    Case("gemma2-softcap", _spec(96, 3, 256, num_kv_heads=2, kv_format="bf16"), 4, softcap=50.0),
    Case("gpt-oss", _spec(128, 4, 64, num_kv_heads=2, kv_format="bf16"), 16, sinks=True, valid_start=True),
    Case("mimo", _spec(48, 3, 192, v_head_dim=128, num_kv_heads=2, kv_format="mxfp8"), 8, sinks=True, valid_start=True),
    Case("odd-group", _spec(40, 5, 96, num_kv_heads=2, kv_format="mxfp8"), 6, FP16),
    Case("mha-fp16", _spec(33, 2, 64, num_kv_heads=3, kv_format="fp16"), 3, FP16, valid_start=True),
    Case("window-1", _spec(1, 1, 64, kv_format="bf16"), 2),
    Case("fp32-mxfp8", _spec(70, 2, 128, shared_kv=True), 3, FP32, sinks=True, softcap=20.0),
    Case("narrow-v", _spec(20, 8, 128, v_head_dim=64, kv_format="bf16"), 1),
    Case("wide-v", _spec(130, 2, 64, v_head_dim=128, num_kv_heads=2), 4),
]
FUSED_CASES = [
    Case("v4+", _spec(128, 6, 512, shared_kv=True), 64, sinks=True, q_norm="plain", rope_dim=64, inverse=True),
    Case("v4+-one-token", _spec(128, 1, 512, shared_kv=True), 64, q_norm="plain", rope_dim=64, inverse=True),
    Case("v4+-few-heads", _spec(128, 3, 512, shared_kv=True), 4, q_norm="plain", rope_dim=64, inverse=True),
    Case("gemma3+", _spec(96, 1, 256, kv_format="bf16"), 4, q_norm="weight", rope_dim=256, halves=True),
    Case(
        "gpt-oss+", _spec(64, 4, 64, num_kv_heads=2, kv_format="bf16"), 16, BF16, True, True, rope_dim=64, halves=True
    ),
    Case("96+", _spec(40, 5, 96, num_kv_heads=2), 6, FP16, q_norm="weight", rope_dim=96, halves=True, inverse=True),
    Case("mimo+", _spec(48, 3, 192, v_head_dim=128, num_kv_heads=2), 8, rope_dim=64, halves=True, inverse=True),
    Case(
        "narrow-v+", _spec(20, 8, 128, v_head_dim=64, kv_format="bf16"), 1, q_norm="weight", rope_dim=48, inverse=True
    ),
    Case("halves+", _spec(70, 5, 128, shared_kv=True), 24, q_norm="weight", rope_dim=32, halves=True, inverse=True),
    Case("norm+", _spec(70, 5, 128, shared_kv=True), 24, FP16, softcap=30.0, q_norm="weight"),
    Case(
        "fp32+",
        _spec(70, 2, 128, shared_kv=True),
        3,
        FP32,
        True,
        softcap=9.0,
        q_norm="plain",
        rope_dim=64,
        inverse=True,
    ),
]
"""With norm and RoPE of q in front of attention, and inverse RoPE behind."""
BY_NAME = {case.name: case for case in CASES + FUSED_CASES}


def vectors(case: Case, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    """New k, v (None when K = V) and q for `tokens` tokens."""
    g = torch.Generator().manual_seed(seed)
    spec = case.spec

    def randn(heads: int, dim: int) -> Tensor:
        return torch.randn(tokens, heads, dim, generator=g).to(case.dtype)

    k = randn(spec.num_kv_heads, spec.head_dim)
    v = None if spec.v_head_dim is None else randn(spec.num_kv_heads, spec.v_head_dim)
    return k, v, randn(case.heads, spec.head_dim)


def query_inputs(case: Case, positions: Tensor, seed: int) -> dict[str, Tensor | None]:
    """Weight of the norm of q, and a RoPE table that ends at the last position."""
    g = torch.Generator().manual_seed(seed + 98)
    weight = torch.rand(case.spec.head_dim, generator=g) + 0.5
    angle = torch.arange(int(positions.max()) + 1)[:, None] / 100.0 ** (torch.arange(case.rope_dim // 2) / 16)
    return {
        "q_norm_weight": weight if case.q_norm == "weight" else None,
        "rope": torch.cat([angle.cos(), angle.sin()], -1) if case.rope_dim else None,
    }


def query_options(case: Case) -> dict:
    """The options of attention that go with them."""
    return {
        "q_norm_eps": 1e-5 if case.q_norm else None,
        "rope_interleaved": not case.halves,
        "inverse_rope": case.inverse,
    }


def query_composed(case: Case, x: dict, dtype: torch.dtype, attend: Callable) -> tuple[Tensor, Tensor]:
    """attend(q) -> (out, lse) with norm, RoPE and inverse RoPE around it, each rounded to `dtype`: ops of their own."""
    q, at = x["q"].to(dtype), x["positions"]
    if case.q_norm:
        q = rms_norm(q, x["q_norm_weight"], 1e-5).to(dtype)
    if case.rope_dim:
        q = rotate(q, at, x["rope"], not case.halves).to(dtype)
    out, lse = attend(q)
    return rotate(out.to(dtype), at, x["rope"], not case.halves, True) if case.inverse else out, lse


def judge(case: Case, x: dict, got: tuple[Tensor, Tensor], exact: Callable) -> int:
    """(out, lse) of attention against fp64, relative to the error of the plain computation in the input dtype.

    Returns how many rows it has compared.

    `exact(case, x, dtype of q, dtype of the attention)`. lse has errors of fp32 alone, and where q is normed or turned
    that of rounding it once: a quarter more at most than the same in an op of its own, as roundings fall differently.
    """
    (out, lse), live = got, x["state_ids"] >= 0
    (want, want_lse), (plain, _) = exact(case, x), exact(case, x, case.dtype)
    assert out.dtype == case.dtype and lse.dtype == FP32
    assert not out[~live].any() and (lse[~live] == -torch.inf).all()
    factor = 2.0 if case.dtype == FP32 else 1.0
    assert_as_good_as(out[live], want[live], plain[live].to(case.dtype), factor)
    if case.q_norm or case.rope_dim:
        _, rounded_lse = exact(case, x, case.dtype, torch.float64)
        assert_as_good_as(lse[live], want_lse[live], rounded_lse[live], 1.25 * factor)
    else:
        torch.testing.assert_close(lse[live].double(), want_lse[live], rtol=1e-5, atol=5e-5)
    return int(live.sum())


def steps(case: Case, starts: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
    """state_ids and positions of a decode step, tokens_per_step tokens of each sequence; slot -1: a padded sequence."""
    d = case.spec.tokens_per_step
    state_ids = torch.tensor(slots, dtype=torch.int32).repeat_interleave(d)
    positions = (torch.tensor(starts)[:, None] + torch.arange(d)).flatten()
    return state_ids, torch.where(state_ids >= 0, positions, -1)


def filled_cache(case: Case, seed: int = 1) -> Tensor:
    """A cache in which every row of every slot holds a random record."""
    cache = torch.zeros(case.spec.cache_shape(case.slots), dtype=torch.uint8)
    rows = case.spec.rows
    for slot in range(case.slots):
        k, v, _ = vectors(case, rows, seed + slot)
        swa.store(k, v, cache, torch.full((rows,), slot, dtype=torch.int32), torch.arange(rows), spec=case.spec)
    return cache


def decode_inputs(case: Case, seed: int = 0) -> dict[str, Tensor | None]:
    """A decode step at the window's corners: first token, window just full, ring wrapped, far out, one padded row."""
    w, r = case.spec.window, case.spec.rows
    starts = [0, max(w - 2, 0), r + 3, 0, 10 * r + 7]
    state_ids, positions = steps(case, starts, [2, 0, 3, -1, 1])
    k, v, q = vectors(case, len(state_ids), seed)
    g = torch.Generator().manual_seed(seed + 99)
    return {
        "k": k,
        "v": v,
        "q": q,
        "cache": filled_cache(case),
        "state_ids": state_ids,
        "positions": positions,
        "valid_start": (positions - w // 3).clamp(min=0).int() if case.valid_start else None,
        "sinks": torch.randn(case.heads, generator=g) if case.sinks else None,
        **query_inputs(case, positions, seed),
    }


EPS, X_EPS = 2.0**-8, 0.75
"""Of the norms: large enough to show in bf16."""


def norm_inputs(case: Case, x: dict, width: int = 40, rope_dim: int = 64, rows: int | None = None) -> dict:
    """The inputs `x`, and what norm and RoPE take besides: weights, a RoPE table, rows x [T, width].

    k and x hold whole numbers: their squares add up to the same in any order, so that bytes can be compared. Both are
    slices of one merged projection, as the layers of models have them.
    """
    g = torch.Generator().manual_seed(17)
    tokens, heads, dim = x["k"].shape
    merged = torch.randint(-9, 10, (tokens, width + heads * dim + 8), generator=g).to(case.dtype)
    angles = torch.rand(int(x["positions"].max()) + 1 if rows is None else rows, rope_dim // 2, generator=g) * 6.3
    return {
        **x,
        "x": merged[:, 8 : 8 + width],
        "k": merged[:, 8 + width :].unflatten(1, (heads, dim)),
        "x_weight": torch.rand(width, generator=g) + 0.5,
        "norm_weight": (torch.rand(dim, generator=g) + 0.5).to(case.dtype),
        "rope": torch.cat([angles.cos(), angles.sin()], 1),
    }


def prefill_inputs(case: Case, seed: int = 0, q_lens: tuple[int, ...] = (1, 7, 0, 40, 3)) -> dict[str, Tensor | None]:
    """A mixed batch: decode and prefill tokens, an empty sequence, history or none, wrapped or not, padding at the end.

    k and v are as read back from a record. Per token: state_ids, positions, q_starts, valid_start; per sequence: slots,
    starts, q_lens, lower (first valid position).
    """
    starts, slots = [300, 0, 5, case.spec.rows + 3, 2][: len(q_lens)], [0, 1, -1, 3, 2][: len(q_lens)]
    lens = torch.tensor([*q_lens, 2])
    per_token = torch.tensor([*starts, 0]).repeat_interleave(lens)
    first = torch.tensor([*q_lens, 2]).cumsum(0) - lens
    positions = per_token + torch.arange(int(lens.sum())) - first.repeat_interleave(lens)
    state_ids = torch.tensor([*slots, -1], dtype=torch.int32).repeat_interleave(lens)
    lower = (torch.tensor(starts) - case.spec.window // 3).clamp(min=0).int()
    k, v, q = vectors(case, len(positions), seed)
    g = torch.Generator().manual_seed(seed + 99)
    return {
        "q": q,
        "k": records.round_trip(k, case.spec.kv_format, 1e-4),
        "v": None if v is None else records.round_trip(v, case.spec.kv_format, 1e-4),
        "cache": filled_cache(case),
        "state_ids": state_ids,
        "positions": torch.where(state_ids >= 0, positions, -1),
        "q_starts": per_token,
        "valid_start": torch.cat([lower, lower.new_zeros(1)]).repeat_interleave(lens) if case.valid_start else None,
        "sinks": torch.randn(case.heads, generator=g) if case.sinks else None,
        **query_inputs(case, positions, seed),
        "slots": torch.tensor(slots, dtype=torch.int32),
        "starts": torch.tensor(starts),
        "q_lens": torch.tensor(q_lens),
        "lower": lower if case.valid_start else None,
    }


def prefill_op(case: Case):  # noqa: ANN201
    def fn(q, k, v, cache, state_ids, positions, q_starts, valid_start, sinks, weight=None, rope=None):  # noqa: ANN001, ANN202
        return swa.attention_prefill(
            q,
            k,
            v,
            cache,
            state_ids,
            positions,
            q_starts,
            spec=case.spec,
            valid_start=valid_start,
            sinks=sinks,
            softcap=case.softcap,
            q_norm_weight=weight,
            rope=rope,
            return_lse=True,
            **query_options(case),
        )

    return fn


def gather_op(case: Case):  # noqa: ANN201
    def fn(cache, slots, starts, lower, k, v):  # noqa: ANN001, ANN202
        return swa.gather(cache, slots, starts, spec=case.spec, dtype=case.dtype, valid_start=lower, k=k, v=v)

    return fn


def workspace_op(case: Case):  # noqa: ANN201
    def fn(q, k, v, pivots, sinks):  # noqa: ANN001, ANN202
        return swa.attention_workspace(
            q, k, v, pivots, window=case.spec.window, sinks=sinks, softcap=case.softcap, return_lse=True
        )

    return fn


def index_op(case: Case):  # noqa: ANN201
    def fn(q, cache, index, sinks):  # noqa: ANN001, ANN202
        return swa.attention_index(
            q,
            cache,
            index,
            kv_format=case.spec.kv_format,
            v_head_dim=case.spec.v_head_dim,
            sinks=sinks,
            softcap=case.softcap,
            return_lse=True,
        )

    return fn


def cast_back_op(case: Case, norm_eps: float | None = None, interleaved: bool = True):  # noqa: ANN201
    def fn(k, v, cache, state_ids, positions, norm_weight=None, rope=None):  # noqa: ANN001, ANN202
        options = {"norm_eps": norm_eps, "norm_weight": norm_weight, "rope": rope, "rope_interleaved": interleaved}
        return swa.store_cast_back(k, v, cache, state_ids, positions, spec=case.spec, **options)

    return fn


def norm_store_op(case: Case, norm_eps: float | None = EPS, interleaved: bool = True):  # noqa: ANN201
    def fn(x, x_weight, k, v, cache, state_ids, positions, norm_weight=None, rope=None):  # noqa: ANN001, ANN202
        options = {"norm_eps": norm_eps, "norm_weight": norm_weight, "rope": rope, "rope_interleaved": interleaved}
        args = (x, k, v, cache, state_ids, positions)
        return swa.norm_store(*args, spec=case.spec, x_eps=X_EPS, x_weight=x_weight, **options)

    return fn


def plain_pivots(case: Case, x: dict) -> Tensor:
    """Pivots of `prefill_inputs`, token by token; padding tokens see nothing."""
    w, rows = case.spec.window, []
    base = len(x["slots"]) * w
    first = 0
    for b, (start, n) in enumerate(zip(x["starts"].tolist(), x["q_lens"].tolist(), strict=True)):
        for j in range(n):
            lo = max(start + j - w + 1, 0 if x["lower"] is None else int(x["lower"][b]), 0)
            skip = min(lo, start) - (start - w)
            k_lo = max(0, lo - start)
            live = x["slots"][b] >= 0
            rows.append((b * w + skip, w - skip, base + first + k_lo, j - k_lo + 1) if live else (0, 0, 0, 0))
        first += n
    return torch.tensor(rows + [(0, 0, 0, 0)] * (len(x["positions"]) - first), dtype=torch.int32)


def store_op(case: Case, norm_eps: float | None = None, interleaved: bool = True):  # noqa: ANN201  a closure over the geometry
    def fn(k, v, cache, state_ids, positions, norm_weight=None, rope=None) -> None:  # noqa: ANN001
        options = {"norm_eps": norm_eps, "norm_weight": norm_weight, "rope": rope, "rope_interleaved": interleaved}
        swa.store(k, v, cache, state_ids, positions, spec=case.spec, **options)

    return fn


def attention_op(case: Case, return_lse: bool = True, tokens_per_step: int | None = None):  # noqa: ANN201
    def fn(
        q: Tensor,
        cache: Tensor,
        state_ids: Tensor,
        positions: Tensor,
        valid_start: Tensor | None,
        sinks: Tensor | None,
        weight: Tensor | None = None,
        rope: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return swa.attention(
            q,
            cache,
            state_ids,
            positions,
            spec=case.spec,
            valid_start=valid_start,
            sinks=sinks,
            softcap=case.softcap,
            tokens_per_step=case.spec.tokens_per_step if tokens_per_step is None else tokens_per_step,
            q_norm_weight=weight,
            rope=rope,
            return_lse=return_lse,
            **query_options(case),
        )

    return fn


def inlined_calls(case: Case, x: dict[str, Tensor | None]) -> dict[str, tuple]:
    """Calls of the ops without a template, on the rows of `decode_inputs`: a sequence per row, at most a token each."""
    spec, ids, at = case.spec, x["state_ids"], x["positions"].clamp(min=0)
    raw = swa.RawRingSpec(4, spec.tokens_per_step, 16, "bf16" if case.dtype == BF16 else "fp32")
    rows = torch.arange(len(ids))
    lens = (rows % 2).int()
    len1 = rows % (spec.window + 1)
    ring = torch.randint(0, 120, raw.ring.cache_shape(case.slots), generator=torch.Generator().manual_seed(7))
    geometry = {"spec": spec, "num_slots": case.slots}

    def decode_index(ids: Tensor, at: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        return swa.decode_index(ids, at, valid_start=start, **geometry)

    def prefill_plan(ids: Tensor, q: Tensor, k: Tensor, start: Tensor | None, tokens: Tensor) -> tuple[Tensor, ...]:
        return swa.prefill_plan(ids, q, k, valid_start=start, num_tokens=len(tokens), **geometry)

    return {
        "decode_index": (decode_index, [ids, at, x["valid_start"]]),
        "prefill_plan": (prefill_plan, [ids, lens, at.int() + lens, x["valid_start"], rows.float()]),
        "prefill_index": (
            lambda pivots: swa.prefill_index(pivots, spec=spec),
            [torch.stack([rows, len1, rows + 9, spec.window - len1], 1).int()],
        ),
        "ring_read_raw": (
            lambda ring, *rest: swa.ring_read_raw(ring, *rest[:2], spec=raw, valid_start=rest[2]),
            [ring.to(torch.uint8), ids, at, x["valid_start"]],
        ),
    }


def flat(step: swa.PreparedDecode) -> tuple[Tensor, ...]:
    """The tensors of a prepared step, in the order of the op's results."""
    m = step.metadata
    rows = (m.state_ids, m.positions, m.valid_start, m.store_rows, m.offset_len, m.index)
    return tuple(t for t in (*rows, step.lengths, step.errors) if t is not None)


def unflat(*tensors: Tensor) -> swa.PreparedDecode:
    """Inverse of `flat`."""
    *rows, lengths, errors = tensors
    return swa.PreparedDecode(swa.DecodeMetadata(*rows), lengths, errors)


def prepare_op(spec: swa.RingSpec, slots: int, width: int | None = None):  # noqa: ANN201
    """prepare_decode over (lengths, accepted, state_ids, valid_start, draft_counts); `out` where buffers follow."""

    def fn(lengths, accepted, ids, start, drafts, *buffers):  # noqa: ANN001, ANN202
        out = unflat(*buffers) if buffers else None
        step = swa.prepare_decode(
            lengths,
            accepted,
            ids,
            spec=spec,
            num_slots=slots,
            valid_start=start,
            draft_counts=drafts,
            width=width,
            out=out,
        )
        return None if buffers else flat(step)

    return fn


def prepare_calls(case: Case, sequences: int) -> dict[str, tuple]:
    """Calls of prepare_decode and its overload for a batch with padded, bad and shortened sequences."""
    d, at = case.spec.tokens_per_step, torch.arange(sequences)
    lengths = torch.randint(0, 1000, (sequences,), generator=torch.Generator().manual_seed(sequences))
    start = (lengths // 3).int() if case.valid_start else None
    drafts = (at % d).int() if case.sinks else None
    args = [lengths, (at % (d + 1)).int(), (at % (case.slots + 2) - 1).int(), start, drafts]
    width = case.spec.window + 2 if case.valid_start else None
    buffers = flat(swa.PreparedDecode.allocate(case.spec, sequences, width=width))
    fn = prepare_op(case.spec, case.slots, width)
    return {"prepare_decode": (fn, args), "prepare_decode.out": (fn, [*args, *buffers])}


def declared_as_written(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Buffers that templates are said to write beside their output, in code that is generated from now on."""
    names: set[str] = set()
    append = _inductor.TritonTemplate.maybe_append_choice

    def record(self, *args, mutated_inputs=(), **options):  # noqa: ANN001, ANN002, ANN003, ANN202
        names.update(node.get_name() for node in mutated_inputs)
        return append(self, *args, mutated_inputs=mutated_inputs, **options)

    monkeypatch.setattr(_inductor.TritonTemplate, "maybe_append_choice", record)
    return names


def has_constants(source: str, **constants: object) -> bool:
    """Whether a kernel in the source is generated for these constants."""
    return all(f" {name} : tl.constexpr = {value}\n" in source for name, value in constants.items())


def template_launches(code: GeneratedCode) -> list[str]:
    """Launches of our kernels; beside them a graph may fill one buffer of counters with zeros."""
    ours = [name for name in code.launches if name.startswith("triton_tem")]
    assert len(code.launches) - len(ours) <= 1
    return ours


QUERY_ARGS = ("q_norm_weight", "rope")
PREFILL_ARGS = ("q", "k", "v", "cache", "state_ids", "positions", "q_starts", "valid_start", "sinks", *QUERY_ARGS)
GATHER_ARGS = ("cache", "slots", "starts", "lower", "k", "v")
STORE_ARGS = ("k", "v", "cache", "state_ids", "positions")
TURN_ARGS = (*STORE_ARGS, "norm_weight", "rope")
NORM_STORE_ARGS = ("x", "x_weight", *TURN_ARGS)
ATTENTION_ARGS = ("q", "cache", "state_ids", "positions", "valid_start", "sinks", *QUERY_ARGS)
