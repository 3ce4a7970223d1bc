"""The Gluon kernel of attention: when it is chosen, its logic on the CPU, its registers, and on a GPU its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import (
    ATTENTION_ARGS,
    Case,
    attention_op,
    declared_as_written,
    decode_inputs,
    filled_cache,
    has_constants,
    judge,
    query_inputs,
    steps,
    template_launches,
    vectors,
)
from gluon_on_cpu import run_gluon
from numerics import assert_same
from test_attention import exact

import swa_inductor as swa
from swa_inductor import reference
from swa_inductor.lowerings import _attention_sm90 as choice
from swa_inductor.lowerings import _template
from swa_inductor.testing import GeneratedCode, generate_code, resource_usage, run_on_cpu

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
CASES = [
    Case("64 heads", V4, 64, sinks=True),
    Case("128 heads", V4, 128, sinks=True, valid_start=True),
    Case("norm and RoPE", V4, 64, sinks=True, q_norm="plain", rope_dim=64, inverse=True),
    Case("norm and RoPE, 128 heads", V4, 128, q_norm="plain", rope_dim=64, inverse=True),
    Case("RoPE alone", V4, 64, rope_dim=32),
    Case("two kv heads, 5 tokens", swa.RingSpec(100, 5, 512, shared_kv=True, num_kv_heads=2), 128),
    Case("16 tokens of 65 keys, RoPE of a slice", swa.RingSpec(65, 16, 512, shared_kv=True), 64, rope_dim=128),
    Case("1 token, tight ring", swa.RingSpec(128, 1, 512, shared_kv=True, ring_rows=128), 64, valid_start=True),
]
SHARES = [{}, {"TOKENS": 1, "HEADS": 64, "SPLITS": 1, "AHEAD": 2}, {"TOKENS": 1, "HEADS": 64, "SPLITS": 4, "AHEAD": 2}]
"""How programs share a step: {} is whole steps per program."""
pytestmark = pytest.mark.gluon
every_share = pytest.mark.parametrize("share", SHARES, ids=lambda s: f"splits {s.get('SPLITS', 0)}")


def shared_by(monkeypatch: pytest.MonkeyPatch, share: dict[str, int]) -> None:
    real = choice.config
    monkeypatch.setattr(choice, "config", lambda _, *shape: share or real(None, *shape))


def is_gluon(code: GeneratedCode) -> bool:
    return any("@gluon.jit" in code.kernel_source(name) for name in code.kernels)


def arguments(x: dict[str, Any]) -> list[Any]:
    return [x[name] for name in ATTENTION_ARGS]


def emulate(code: GeneratedCode, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_gluon(code, {name: x[name] for name in ATTENTION_ARGS})


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_chosen_on_sm_90_alone(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, which writes lse and scratch beside its output, and no argument."""
    x, written = decode_inputs(CASES[0]), declared_as_written(monkeypatch)
    code = generate_code(attention_op(CASES[0]), *arguments(x), capability=capability)
    assert len(template_launches(code)) == 1 and "_cpu(" not in code.call
    assert is_gluon(code) == (capability == (9, 0))
    assert written and all(name.startswith("buf") for name in written)


@pytest.mark.parametrize(
    "case",
    [
        Case("8 heads", V4, 8),
        Case("fp16", V4, 64, torch.float16),
        Case("soft-cap", V4, 64, softcap=50.0),
        Case("short window", swa.RingSpec(64, 6, 512, shared_kv=True), 64),
        Case("long step", swa.RingSpec(128, 17, 512, shared_kv=True), 64),
        Case("96 heads", V4, 96),
        Case("wide RoPE", V4, 64, rope_dim=256),
        Case("long window", swa.RingSpec(129, 6, 512, shared_kv=True), 64),
        Case("narrow", swa.RingSpec(128, 6, 256, shared_kv=True), 64),
        Case("bf16 records", swa.RingSpec(128, 6, 512, shared_kv=True, kv_format="bf16"), 64),
        Case("norm with weights", V4, 64, q_norm="weight"),
        Case("RoPE by halves", V4, 64, rope_dim=64, halves=True),
        Case("K and V", swa.RingSpec(128, 6, 512), 64),
    ],
    ids=lambda c: c.name,
)
def test_other_shapes_are_left_to_triton(case: Case) -> None:
    assert not is_gluon(generate_code(attention_op(case), *arguments(decode_inputs(case))))


def test_rows_that_words_do_not_divide_are_left_to_triton() -> None:
    x = decode_inputs(CASES[0])
    state = torch.zeros(4, 134 * 528 + 8, dtype=torch.uint8)
    x["cache"] = state[:, : 134 * 528].view(4, 134, 1, 528)
    assert not is_gluon(generate_code(attention_op(CASES[0]), *arguments(x)))


@pytest.mark.parametrize("row_bytes", [2**24 - 16, 2**24])
def test_rings_of_2_gib_are_left_to_triton(row_bytes: int) -> None:
    """Of 128 rows, with as much between them: offsets within a ring have 32 bits. No page of it is touched."""
    case = Case("tight ring", swa.RingSpec(128, 1, 512, shared_kv=True, ring_rows=128), 64)
    x = dict(decode_inputs(case), cache=torch.empty(1, 128, 1, row_bytes, dtype=torch.uint8)[..., :528])
    assert is_gluon(generate_code(attention_op(case), *arguments(x))) == (row_bytes < 2**24)


@pytest.mark.parametrize(("pad", "served"), [(8, True), (4, False)])
def test_rows_of_q_are_read_16_bytes_at_a_time(pad: int, served: bool) -> None:
    x = decode_inputs(CASES[0])
    x["q"] = torch.nn.functional.pad(x["q"], (0, pad))[..., :512]
    assert is_gluon(generate_code(attention_op(CASES[0]), *arguments(x))) == served


def test_a_producer_of_q_fuses_into_the_triton_template() -> None:
    def doubled(q: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return attention_op(CASES[0], return_lse=False)(q * 2, *args)

    code = generate_code(doubled, *arguments(decode_inputs(CASES[0])))
    assert len(template_launches(code)) == len(code.kernels) == 1 and not is_gluon(code)


def test_q_of_a_product_is_not_such_a_producer() -> None:
    def projected(x: torch.Tensor, weight: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return attention_op(CASES[0], return_lse=False)((x @ weight).view(-1, 64, 512), *args)

    x = decode_inputs(CASES[0])
    args = (torch.randn(len(x["q"]), 32).bfloat16(), torch.randn(32, 64 * 512).bfloat16(), *arguments(x)[1:])
    assert is_gluon(generate_code(projected, *args))


@pytest.mark.parametrize(
    ("asked", "triton", "wanted"),
    [(None, "3.6.0", True), (None, "3.7.1", False), (None, None, False), ("0", "3.6.0", False), ("1", "3.7.1", True)],
)
def test_on_where_it_has_run_on_a_card(
    asked: str | None, triton: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if triton is None:
            raise _template.PackageNotFoundError(name)
        return triton

    monkeypatch.setattr(_template, "version", version)
    assert _template.gluon_wanted(asked) == wanted


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template, "GLUON", False)
    assert not is_gluon(generate_code(attention_op(CASES[0]), *arguments(decode_inputs(CASES[0]))))


def test_interpreter_says_that_it_does_not_know_gluon() -> None:
    x = decode_inputs(CASES[0])
    code = generate_code(attention_op(CASES[0]), *arguments(x))
    with pytest.raises(ValueError, match="SWA_INDUCTOR_GLUON=0"):
        run_on_cpu(code, arguments(x))


@pytest.mark.parametrize(("rows", "groups"), [(128, 16), (128, 4), (16, 16)])
def test_lanes_of_a_row_are_adjacent(rows: int, groups: int) -> None:
    """A reduction over the blocks of a row shuffles the lowest lanes, wherever the layout puts them (Triton 3.6)."""
    from swa_inductor.lowerings import _sm90

    layout = _sm90.blocks_layout(rows, groups, 8)
    layout = getattr(layout, "value", layout)
    across = [base[1] > 0 for base in layout.lane_bases]
    assert across == sorted(across, reverse=True) and any(across)
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    held = {tuple(b) for b in bases if any(b)}
    assert len(held) == sum(n.bit_length() - 1 for n in (rows, groups, 8))  # every word is somewhere, and once


def test_how_programs_share_a_step() -> None:
    def of(sequences: int | None, heads: int = 64) -> tuple[int, int, int]:
        options = choice.config(sequences, 6, heads, heads, 132)
        return options["TOKENS"], options["HEADS"], options["SPLITS"]

    assert of(1) == (1, 64, 4) and of(8) == (1, 64, 2) and of(20) == (1, 64, 1)
    assert of(40) == (2, 64, 0) and of(64) == (3, 64, 0) and of(256) == of(None) == (6, 64, 0)
    assert of(64, 128) == (3, 128, 0) and of(8, 128) == (1, 64, 1)
    assert of(11) == (1, 64, 2) and of(22) == (1, 64, 1) and of(23) == of(44) == (2, 64, 0) and of(45) == (3, 64, 0)
    assert of(66) == (3, 64, 0) and of(67) == of(100) == (6, 64, 0)
    assert [choice.config(n, 6, 64, 64, 132)["AHEAD"] for n in (1, 22, 23, None)] == [2, 2, 1, 1]
    assert choice.config(100, 6, 192, 192, 132)["HEADS"] == 64 and choice.config(100, 6, 256, 256, 132)["HEADS"] == 128


@pytest.mark.parametrize(
    ("case", "share"),
    # Of columns split over programs one case is enough: they differ in where their slices start.
    [
        pytest.param(c, s, id=f"{c.name}-splits {s.get('SPLITS', 0)}")
        for c in CASES
        for s in SHARES
        if c is CASES[0] or s.get("SPLITS", 0) < 2
    ],
)
def test_logic(case: Case, share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right against fp64; padded rows 0 and -inf, whatever their q holds; nobody reads a row that nobody sees."""
    shared_by(monkeypatch, share)
    x = decode_inputs(case)
    lo, n = reference.visible_range(x["cache"], x["state_ids"], x["positions"], x["valid_start"], case.spec.window)
    seen = torch.zeros(case.slots, case.spec.rows, dtype=torch.bool)
    for t in range(len(n)):
        seen[x["state_ids"][t], (lo[t] + torch.arange(int(n[t]))) % case.spec.rows] = True
    y = dict(x, cache=torch.where(seen[..., None, None], x["cache"], 0x7F), q=x["q"].clone())
    y["q"][x["state_ids"] < 0] = math.nan
    out, lse = emulate(generate_code(attention_op(case), *arguments(y)), y)
    assert lse is not None
    assert judge(case, x, (out, lse), exact) > 0


def test_an_unknown_number_of_tokens_takes_whole_steps() -> None:
    x = decode_inputs(CASES[0])
    dynamic = [ATTENTION_ARGS.index(name) for name in ("q", "state_ids", "positions")]
    code = generate_code(attention_op(CASES[0]), *arguments(x), dynamic_inputs=dynamic)
    assert is_gluon(code) and has_constants(code.source, TOKENS=6)
    assert judge(CASES[0], x, emulate(code, x), exact) > 0


@every_share
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_record_reaches_only_who_sees_it(
    value: float, share: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_by(monkeypatch, share)
    case = CASES[0]
    args, broken = broken_inputs(case, value)
    code = generate_code(attention_op(case, return_lse=False), *args)
    clean, _ = emulate(code, dict(zip(ATTENTION_ARGS, args, strict=True)))
    out, _ = emulate(code, dict(zip(ATTENTION_ARGS, (args[0], broken, *args[2:]), strict=True)))
    assert not out[5].isfinite().any()
    assert_same(out[:5], clean[:5])
    assert_same(out[6:], clean[6:])


def broken_inputs(case: Case, value: float) -> tuple[list[Any], torch.Tensor]:
    """Two steps, and the cache with a record of `value` at the last position of the first."""
    state_ids, positions = steps(case, [300, 7], [1, 2])
    _, _, q = vectors(case, len(positions))
    cache = filled_cache(case)
    broken = cache.clone()
    k = torch.full((1, 1, 512), value, dtype=case.dtype)
    swa.store(k, None, broken, state_ids[5:6], positions[5:6], spec=case.spec)
    return [q, cache, state_ids, positions, *[None] * (len(ATTENTION_ARGS) - 4)], broken


def test_a_strided_cache() -> None:
    case = CASES[0]
    x = decode_inputs(case)
    state = torch.full((4, 200_000), 0x7F, dtype=torch.uint8)
    view = state[:, 70_752 : 70_752 + V4.ring_bytes].view(V4.cache_shape(4))
    view.copy_(x["cache"])
    y = dict(x, cache=view)
    out, _ = emulate(generate_code(attention_op(case), *arguments(y)), y)
    want, _ = emulate(generate_code(attention_op(case), *arguments(x)), x)
    assert_same(out, want)


def test_epilogue_fuses() -> None:
    x = decode_inputs(CASES[0])
    gate, bias = torch.randn_like(x["q"]), torch.randn(512)

    def gated(gate: torch.Tensor, bias: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        out = attention_op(CASES[0], return_lse=False)(*args)
        return (out.float() * torch.sigmoid(gate.float()) + bias).to(torch.float16)

    code = generate_code(gated, gate, bias, *arguments(x))
    assert is_gluon(code) and len(code.launches) == 1
    assert [a.dtype for a in code.allocations] == ["torch.float16"]
    (usage,) = resource_usage(gated, gate, bias, *arguments(x))
    assert usage.spills <= 200


@every_share
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "norm and RoPE"])
@pytest.mark.parametrize("heads", [64, 128])
def test_usage(
    heads: int, turned: bool, share: dict[str, int], monkeypatch: pytest.MonkeyPatch, record_property
) -> None:  # noqa: ANN001
    """One block per multiprocessor: all registers, nearly no spills."""
    shared_by(monkeypatch, share)
    around = {"q_norm": "plain", "rope_dim": 64, "inverse": True} if turned else {}
    case = Case("V4", V4, heads, sinks=True, valid_start=True, **around)  # type: ignore[arg-type]
    (usage,) = resource_usage(attention_op(case), *arguments(decode_inputs(case)))
    record_property("kernel", f"sm_90  Gluon {heads} heads {share} {usage}")
    assert usage.num_warps == 8 and usage.spills <= 100 and usage.shared_bytes <= 227 * 1024


# ----------------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(fn: Any, args: list[Any]) -> Any:
    """Compile caches, which other processes write too, do not know how a test lets programs share steps."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        return torch.compile(fn, fullgraph=True, dynamic=False)(*(a.cuda() if a is not None else None for a in args))


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 8, 20, 40, 64, 150])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu_values(case: Case, sequences: int) -> None:
    """Every way to share a step: against fp64; padded rows, and rows that nobody sees, hold NaN codes."""
    g = torch.Generator().manual_seed(sequences)
    starts = torch.randint(0, 500, (sequences,), generator=g).tolist()
    slots = (torch.arange(sequences) % (case.slots + 1) - 1).tolist() if sequences > 1 else [2]
    x = decode_inputs(case)
    x["state_ids"], x["positions"] = steps(case, starts, slots)
    x["q"] = vectors(case, len(x["positions"]), 5)[2]
    x |= query_inputs(case, x["positions"], 5)
    if case.valid_start:
        x["valid_start"] = (x["positions"] - 40).clamp(min=0).int()
    y = dict(x, q=x["q"].clone())
    y["q"][x["state_ids"] < 0] = math.nan
    out, lse = (t.cpu() for t in on_gpu(attention_op(case), arguments(y)))
    assert judge(case, x, (out, lse), exact) > 0


@pytest.mark.gpu
@every_share
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gpu_broken_record(value: float, share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared_by(monkeypatch, share)
    case = CASES[0]
    args, broken = broken_inputs(case, value)
    op = attention_op(case, return_lse=False)
    clean, out = (on_gpu(op, [args[0], cache, *args[2:]]) for cache in (args[1], broken))
    assert not out[5].isfinite().any()
    assert_same(torch.cat([out[:5], out[6:]]), torch.cat([clean[:5], clean[6:]]))


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 8, 64, 150])
def test_gpu_replays_with_changed_inputs(sequences: int) -> None:
    """A recorded graph reads positions and slots anew, and gives the same bits for the same inputs."""
    case = CASES[0]
    cache = filled_cache(case).cuda()
    step = torch.compile(attention_op(case, return_lse=False), fullgraph=True, mode="reduce-overhead", dynamic=False)
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(1)
    for i in range(8):
        slots = torch.randint(-1, case.slots, (sequences,), generator=g).tolist()
        state_ids, positions = steps(case, torch.randint(0, 500, (sequences,), generator=g).tolist(), slots)
        q = vectors(case, len(positions), i)[2]
        rest = [None] * (len(ATTENTION_ARGS) - 4)
        inputs = [q.cuda(), cache, state_ids.cuda(), positions.cuda(), *rest]
        torch.compiler.cudagraph_mark_step_begin()
        out = step(*inputs).clone()
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(step(*inputs), out)
        want, _ = attention_op(case)(q, cache.cpu(), state_ids, positions, *rest)
        torch.testing.assert_close(out.cpu(), want, rtol=2e-2, atol=2e-2)
