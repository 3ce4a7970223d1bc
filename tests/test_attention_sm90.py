"""The Gluon kernel of attention: when it is chosen, its logic on the CPU, its registers, and on a GPU its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import ATTENTION_ARGS, Case, attention_op, decode_inputs, filled_cache, steps, template_launches, vectors
from gluon_on_cpu import run_gluon
from numerics import assert_as_good_as, assert_same
from test_attention import exact

import swa_inductor as swa
from swa_inductor import reference, reference_rope
from swa_inductor.lowerings import _attention_sm90 as choice
from swa_inductor.lowerings import _inductor, _template
from swa_inductor.testing import GeneratedCode, generate_code, resource_usage, run_on_cpu

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
CASES = [
    Case("64 heads", V4, 64, sinks=True),
    Case("128 heads", V4, 128, sinks=True, valid_start=True),
    Case("two kv heads, 5 tokens", swa.RingSpec(100, 5, 512, shared_kv=True, num_kv_heads=2), 128),
    Case("1 token, tight ring", swa.RingSpec(128, 1, 512, shared_kv=True, ring_rows=128), 64, valid_start=True),
]
SHARES = [{}, {"TOKENS": 1, "HEADS": 64, "SPLITS": 1, "AHEAD": 4}, {"TOKENS": 1, "HEADS": 64, "SPLITS": 4, "AHEAD": 4}]
"""How programs share a step: {} is whole steps per program."""
every_share = pytest.mark.parametrize("share", SHARES, ids=lambda s: f"splits {s.get('SPLITS', 0)}")


def shared_by(monkeypatch: pytest.MonkeyPatch, share: dict[str, int]) -> None:
    real = choice.config
    monkeypatch.setattr(choice, "config", lambda _, *shape: share or real(None, *shape))


def is_gluon(code: GeneratedCode) -> bool:
    return any("@gluon.jit" in code.kernel_source(name) for name in code.kernels)


def arguments(x: dict[str, Any]) -> list[Any]:
    return [x[name] for name in ATTENTION_ARGS]


def emulate(code: GeneratedCode, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_gluon(code, {name: x[name] for name in (*ATTENTION_ARGS, "rope") if name in x})


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_chosen_on_sm_90_alone(capability: tuple[int, int]) -> None:
    x = decode_inputs(CASES[0])
    code = generate_code(attention_op(CASES[0]), *arguments(x), capability=capability)
    assert len(template_launches(code)) == 1
    assert is_gluon(code) == (capability == (9, 0))


@pytest.mark.parametrize(
    "case",
    [
        Case("8 heads", V4, 8),
        Case("fp16", V4, 64, torch.float16),
        Case("soft-cap", V4, 64, softcap=50.0),
        Case("short window", swa.RingSpec(64, 6, 512, shared_kv=True), 64),
        Case("long window", swa.RingSpec(129, 6, 512, shared_kv=True), 64),
        Case("narrow", swa.RingSpec(128, 6, 256, shared_kv=True), 64),
        Case("bf16 records", swa.RingSpec(128, 6, 512, shared_kv=True, kv_format="bf16"), 64),
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


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template, "GLUON", False)
    assert not is_gluon(generate_code(attention_op(CASES[0]), *arguments(decode_inputs(CASES[0]))))


def test_interpreter_says_that_it_does_not_know_gluon() -> None:
    x = decode_inputs(CASES[0])
    code = generate_code(attention_op(CASES[0]), *arguments(x))
    with pytest.raises(ValueError, match="SWA_INDUCTOR_GLUON=0"):
        run_on_cpu(code, arguments(x))


def test_how_programs_share_a_step() -> None:
    def of(sequences: int | None, heads: int = 64) -> tuple[int, int, int]:
        options = choice.config(sequences, 6, heads, heads, 132)
        return options["TOKENS"], options["HEADS"], options["SPLITS"]

    assert of(1) == (1, 64, 4) and of(8) == (1, 64, 2) and of(20) == (1, 64, 1)
    assert of(40) == (2, 64, 0) and of(64) == (3, 64, 0) and of(256) == of(None) == (6, 64, 0)
    assert of(64, 128) == (3, 128, 0) and of(8, 128) == (1, 64, 1)


@every_share
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_logic(case: Case, share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right against fp64; padded rows 0 and -inf, whatever their q holds; nobody reads a row that nobody sees."""
    shared_by(monkeypatch, share)
    x = decode_inputs(case)
    live = x["state_ids"] >= 0
    (want, want_lse), (plain, _) = exact(case, x), exact(case, x, case.dtype)
    lo, n = reference.visible_range(x["cache"], x["state_ids"], x["positions"], x["valid_start"], case.spec.window)
    seen = torch.zeros(case.slots, case.spec.rows, dtype=torch.bool)
    for t in range(len(n)):
        seen[x["state_ids"][t], (lo[t] + torch.arange(int(n[t]))) % case.spec.rows] = True
    x["cache"] = torch.where(seen[..., None, None], x["cache"], 0x7F)
    x["q"][~live] = math.nan
    out, lse = emulate(generate_code(attention_op(case), *arguments(x)), x)
    assert lse is not None and not out[~live].any() and (lse[~live] == -math.inf).all()
    assert_as_good_as(out[live], want[live], plain[live].to(case.dtype))
    torch.testing.assert_close(lse[live].double(), want_lse[live], rtol=1e-5, atol=5e-5)


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
    return [q, cache, state_ids, positions, None, None], broken


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
@pytest.mark.parametrize("heads", [64, 128])
def test_usage(heads: int, share: dict[str, int], monkeypatch: pytest.MonkeyPatch, record_property) -> None:  # noqa: ANN001
    """One block per multiprocessor: all registers, nearly no spills."""
    shared_by(monkeypatch, share)
    case = Case("V4", V4, heads, sinks=True, valid_start=True)
    (usage,) = resource_usage(attention_op(case), *arguments(decode_inputs(case)))
    record_property("kernel", f"sm_90  Gluon {heads} heads {share} {usage}")
    assert usage.num_warps == 8 and usage.spills <= 64 and usage.shared_bytes <= 227 * 1024


# ------------------------------------------------------------------------------- norm and RoPE in and behind the kernel


def turned_op(case: Case) -> Any:
    """The kernel with q-norm, RoPE and inverse RoPE, as an op of its own."""
    name = "swa_test_turned"
    if not hasattr(torch.ops, name) or not hasattr(getattr(torch.ops, name), "attend"):
        library = torch.library.Library(name, "DEF")
        library.define("attend(Tensor q, Tensor c, Tensor i, Tensor at, Tensor sinks, Tensor rope) -> (Tensor, Tensor)")

        def fake(q: Any, *_: Any) -> Any:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

        def lower(q: Any, cache: Any, ids: Any, at: Any, sinks: Any, rope: Any) -> Any:
            return choice.lower(
                [q, cache, ids, at],
                sinks,
                cache=cache,
                window=128,
                scale=512**-0.5,
                step=6,
                has_valid_start=False,
                return_lse=True,
                processors=132,
                rope=rope,
                q_norm_eps=1e-6,
                inverse_rope=True,
            )

        torch.library.register_fake(f"{name}::attend", fake, lib=library)
        turned_op.library = library  # type: ignore[attr-defined]  # it lives as long as its registrations
        _inductor.lower(getattr(torch.ops, name).attend.default, cuda=lower, cpu=None)
    return lambda *args: getattr(torch.ops, name).attend(*args)


TURNED_ARGS = ("q", "cache", "state_ids", "positions", "sinks", "rope")


def turned_inputs(case: Case) -> dict[str, Any]:
    x = decode_inputs(case)
    x["q"] = (x["q"] * (1 + torch.arange(case.heads)[:, None] / 7)).bfloat16()
    x["q"][x["state_ids"] < 0] = math.nan
    angle = torch.arange(2000)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    return x | {"rope": torch.cat([angle.cos(), angle.sin()], 1)}


def turned_reference(x: dict[str, Any], dtype: torch.dtype, rounded: bool) -> torch.Tensor:
    def kept(y: torch.Tensor) -> torch.Tensor:
        return y.bfloat16().to(dtype) if rounded else y

    q = kept(reference_rope.rms_norm(x["q"].to(dtype), None, 1e-6))
    q = kept(reference_rope.rotate(q, x["positions"], x["rope"], True))
    out, _ = reference.attention(
        q, *(x[n] for n in ATTENTION_ARGS[1:]), 128, 512**-0.5, "mxfp8", None, None, compute_dtype=dtype
    )
    return kept(reference_rope.rotate(kept(out), x["positions"], x["rope"], True, True))


@every_share
def test_norm_and_rope_in_the_kernel(share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from fp64 than the composition rounded to bf16 at each step; padded rows 0 whatever q holds."""
    shared_by(monkeypatch, share)
    x = turned_inputs(CASES[0])
    live = x["state_ids"] >= 0
    code = generate_code(turned_op(CASES[0]), *(x[n] for n in TURNED_ARGS))
    out, _ = emulate(code, x)
    want, plain = turned_reference(x, torch.float64, False), turned_reference(x, torch.float32, True)
    assert not out[~live].any()
    assert_as_good_as(out[live], want[live], plain[live])
    assert_as_good_as(out[live][..., 448:], want[live][..., 448:], plain[live][..., 448:])


@every_share
def test_usage_with_norm_and_rope(share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared_by(monkeypatch, share)
    x = turned_inputs(CASES[0])
    (usage,) = resource_usage(turned_op(CASES[0]), *(x[n] for n in TURNED_ARGS))
    assert usage.spills <= 160 and usage.shared_bytes <= 227 * 1024


# ----------------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(fn: Any, args: list[Any]) -> Any:
    torch._dynamo.reset()
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
    if case.valid_start:
        x["valid_start"] = (x["positions"] - 40).clamp(min=0).int()
    live = x["state_ids"] >= 0
    x["q"][~live] = math.nan
    out, lse = (t.cpu() for t in on_gpu(attention_op(case), arguments(x)))
    (want, want_lse), (plain, _) = exact(case, x), exact(case, x, case.dtype)
    assert not out[~live].any() and (lse[~live] == -math.inf).all()
    assert_as_good_as(out[live], want[live], plain[live].to(case.dtype))
    torch.testing.assert_close(lse[live].double(), want_lse[live], rtol=1e-5, atol=5e-5)


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
@every_share
def test_gpu_norm_and_rope(share: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared_by(monkeypatch, share)
    x = turned_inputs(CASES[0])
    live = x["state_ids"] >= 0
    out = on_gpu(turned_op(CASES[0]), [x[n] for n in TURNED_ARGS])[0].cpu()
    want, plain = turned_reference(x, torch.float64, False), turned_reference(x, torch.float32, True)
    assert not out[~live].any()
    assert_as_good_as(out[live], want[live], plain[live])


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
        inputs = [q.cuda(), cache, state_ids.cuda(), positions.cuda(), None, None]
        torch.compiler.cudagraph_mark_step_begin()
        out = step(*inputs).clone()
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(step(*inputs), out)
        want, _ = attention_op(case)(q, cache.cpu(), state_ids, positions, None, None)
        torch.testing.assert_close(out.cpu(), want, rtol=2e-2, atol=2e-2)
