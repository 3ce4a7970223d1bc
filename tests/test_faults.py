"""Faults that other projects have had, with their own inputs, where no test of an op holds them already.

Faults of the ring and the window have ids A1 and up, of the records B1, of torch.compile and custom ops C1, of graphs
and metadata D1, of templates and Triton E1, of scheduling F1. A test names those that it guards against in its
docstring; the last test here asks for every one of them, and `python tests/test_faults.py` lists them and their tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import BY_NAME, Case, attention_op, decode_inputs, gather_op, prefill_op, store_op, vectors
from numerics import assert_same
from test_contract import op_calls
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import swa_inductor as swa
from swa_inductor import lowerings, records
from swa_inductor.lowerings import _inductor
from swa_inductor.meta._library import OPS
from swa_inductor.testing import generate_code, run_on_cpu

V4 = BY_NAME["v4"]
NUMBERED = swa.RingSpec(128, 6, 32, shared_kv=True, kv_format="fp32")
"""A ring whose records can be read as numbers."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def eager(fn: Callable, args: list) -> tuple:
    return fn(*args)


def sm_90(fn: Callable, args: list) -> tuple:
    return run_on_cpu(generate_code(fn, *args), args)


every_run = pytest.mark.parametrize("run", [eager, sm_90])


def put(cache: torch.Tensor, spec: swa.RingSpec, first: int, end: int) -> None:
    """Store positions first .. end - 1 of slot 0; the vector of a position is its number."""
    at = torch.arange(first, end)
    numbers = at[:, None, None].expand(-1, 1, spec.head_dim).float()
    swa.store(numbers, None, cache, torch.zeros(len(at), dtype=torch.int32), at, spec=spec)


def window_of(cache: torch.Tensor, spec: swa.RingSpec, position: int) -> list[int]:
    """The numbers in the rows that the query at `position` sees, in order."""
    _, index = swa.decode_index(ints(0), torch.tensor([position]), spec=spec, num_slots=len(cache))
    rows = cache.flatten(0, 1)[index[index >= 0].long()]
    return records.decode(rows, spec.kv_format)[:, 0, 0].int().tolist()


@pytest.mark.parametrize("spec", [NUMBERED, swa.RingSpec(8, 1, 32, shared_kv=True, kv_format="fp32")])
def test_a_ring_that_is_exactly_full(spec: swa.RingSpec) -> None:
    """A1: prefill W - 2 tokens, then decode W - 2 .. W + 1: each window holds its positions, each once, in order."""
    w = spec.window
    cache = torch.full(spec.cache_shape(1), 0xFF, dtype=torch.uint8)
    put(cache, spec, 0, w - 2)
    for p in range(w - 2, w + 2):
        put(cache, spec, p, p + 1)
        assert window_of(cache, spec, p) == list(range(max(0, p - w + 1), p + 1))
        out = swa.attention(torch.zeros(1, 1, 32), cache, ints(0), torch.tensor([p]), spec=spec)
        assert float(out[0, 0, 0]) == pytest.approx((max(0, p - w + 1) + p) / 2, rel=1e-6)


@every_run
def test_a_continuation_in_a_mixed_batch(run: Callable) -> None:
    """A7: q_start 0 and 2048, q_len 10 and 153, in one call: each sequence as if it were alone."""
    case = Case("narrow", swa.RingSpec(128, 6, 64, shared_kv=True), 2)
    spec = case.spec
    k, _, q = vectors(case, 2048 + 163)
    k = records.round_trip(k, "mxfp8", 1e-4)
    cache = torch.full(spec.cache_shape(2), 0x7F, dtype=torch.uint8)
    swa.store(k[163:], None, cache, torch.ones(2048, dtype=torch.int32), torch.arange(2048), spec=spec)
    lens = torch.tensor([10, 153])
    ids, first = ints(0, 1).repeat_interleave(lens), torch.tensor([0, 2048]).repeat_interleave(lens)
    at = torch.cat([torch.arange(10), torch.arange(2048, 2201)])

    def call(part: slice) -> tuple:
        args = [q[:163][part], k[:163][part], None, cache, ids[part], at[part], first[part], None, None]
        return run(prefill_op(case), args)

    together = call(slice(None))
    for part in (slice(0, 10), slice(10, 163)):
        for value, alone in zip(together, call(part), strict=True):
            torch.testing.assert_close(value[part], alone, rtol=1e-2, atol=1e-3)


def test_a_wrong_offset_is_never_repaired() -> None:
    """A7: lists of another length raise; no argument is dropped in silence."""
    k, _, q = vectors(V4, 4)
    cache = torch.zeros(V4.spec.cache_shape(1), dtype=torch.uint8)
    with pytest.raises(swa.InvalidArgumentError, match=r"q_starts shape: got \(3,\)"):
        prefill_op(V4)(q, k, None, cache, ints(0, 0, 0, 0), torch.arange(4), torch.zeros(3).long(), None, None)


@pytest.mark.parametrize("back", range(10))
def test_rolling_a_wrapped_ring_back(back: int) -> None:
    """A8: after position 300, a restart at 294 (7 rows back) finds 167 .. 293; at 293, position 166 is gone."""
    cache = torch.zeros(NUMBERED.cache_shape(1), dtype=torch.uint8)
    put(cache, NUMBERED, 0, 301)
    restart = 301 - back
    put(cache, NUMBERED, restart, restart + 1)
    exact = window_of(cache, NUMBERED, restart) == list(range(restart - 127, restart + 1))
    assert exact == (back <= 7) == (back <= NUMBERED.max_rollback)


@every_run
def test_padding_does_not_wrap_to_the_last_slot(run: Callable) -> None:
    """A16: 8 rows, 5 of them padding at position 0: nothing but 3 rows changes, nor the bytes before the cache."""
    k, _, _ = vectors(V4, 8)
    ring = V4.spec.ring_bytes
    state = torch.randint(0, 256, (32 + 4 * ring + 32,), dtype=torch.uint8)
    cache = state[32 : 32 + 4 * ring].view(V4.spec.cache_shape(4))
    before = state.clone()
    ids, at = ints(0, 1, 2, -1, -1, -1, -1, -1), torch.tensor([133, 7, 140, 0, 0, 0, 0, 0])
    run(store_op(V4), [k, None, cache, ids, at])
    changed = {int(i - 32) // 528 for i in (state != before).nonzero().flatten()}
    assert changed == {133, 134 + 7, 2 * 134 + 6}
    assert torch.equal(cache[:3].flatten(0, 1)[[133, 141, 274]], records.encode_record(k[:3], None, "mxfp8", 1e-4))


@every_run
def test_sequences_without_tokens(run: Callable) -> None:
    """A20: q_lens 0, 3, 0 after 0, 0, 50: 3 * 128 history rows, 3 outputs, all finite, from a ring of NaN codes."""
    spec = V4.spec
    k, _, q = vectors(V4, 53)
    k = records.round_trip(k, "mxfp8", 1e-4)
    cache = torch.full(spec.cache_shape(3), 0x7F, dtype=torch.uint8)
    swa.store(k[3:], None, cache, torch.full((50,), 2, dtype=torch.int32), torch.arange(50), spec=spec)
    new, at = k[:3], torch.arange(3)
    rows = run(gather_op(V4), [cache, ints(0, 1, 2), torch.tensor([0, 0, 50]), None, new, None])[0]
    assert rows.shape == (3 * 128 + 3, 1, 512) and rows.isfinite().all()
    assert not rows[: 2 * 128 + 78].any() and torch.equal(rows[3 * 128 - 50 :], torch.cat([k[3:], new]))
    zeros = torch.zeros(3, dtype=torch.int64)
    out, lse = run(prefill_op(V4), [q[:3], new, None, cache, ints(1, 1, 1), at, zeros, None, None])
    assert out.shape == (3, 8, 512) and out.isfinite().all() and lse.isfinite().all()


@every_run
def test_every_row_of_the_workspace_is_written(run: Callable) -> None:
    """B5: 28 zero rows before 100 of history; buffers start as 0xFF, and none of it is left."""
    x = torch.zeros(V4.spec.cache_shape(2), dtype=torch.uint8)
    args = [x, ints(1), torch.tensor([300]), ints(200), None, None]
    rows = run(gather_op(V4), args)[0]
    assert_same(rows, torch.zeros(128, 1, 512, dtype=torch.bfloat16))
    swa.store(vectors(V4, 134)[0], None, x, torch.ones(134, dtype=torch.int32), torch.arange(166, 300), spec=V4.spec)
    rows = run(gather_op(V4), args)[0]
    assert not rows[:28].any() and rows[28:].any(-1).all() and rows.isfinite().all()


@every_run
def test_codes_are_e4m3fn(run: Callable) -> None:
    """B8: -0.0 and 1.0 are stored as 0x80 and 0x38 (scale byte 127), and read as such; e4m3fnuz would read NaN, 0.5."""
    case = Case("one", swa.RingSpec(4, 1, 64, shared_kv=True), 1, torch.float32)
    k = torch.zeros(1, 1, 64)
    k[0, 0, :3] = torch.tensor([-0.0, 1.0, 448.0])  # 448 makes the scale 1
    cache = torch.zeros(case.spec.cache_shape(1), dtype=torch.uint8)
    run(store_op(case), [k, None, cache, ints(0), torch.zeros(1, dtype=torch.int64)])
    assert cache[0, 0, 0, :3].tolist() == [0x80, 0x38, 0x7E] and cache[0, 0, 0, 64:].tolist() == [127, 105]
    rows = run(gather_op(case), [cache, ints(0), torch.tensor([1]), None, None, None])[0]
    assert_same(rows[3, 0, :3], k[0, 0, :3])


def sentinel(size: int) -> torch.Tensor:
    return (torch.arange(size) & 0xFF).to(torch.uint8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_528_bytes_are_moved_whole(dtype: str) -> None:
    """B10: entries of 528 bytes, no multiple of a block: each byte arrives, and the guards around them stay."""
    width = 528 // (4 if dtype == "fp32" else 2)
    spec = swa.RawRingSpec(2, 1, width, dtype)
    entry = sentinel(528).view(records.RAW_DTYPES[dtype])
    for run in (eager, sm_90):
        state = torch.full((32 + 3 * 2 * 528 + 32,), 0xA5, dtype=torch.uint8)
        cache = state[32:-32].view(3, 2, 1, 528)

        def write(values: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> None:
            swa.ring_write_raw(values, cache, ids, at, spec=spec)

        run(write, [entry[None].repeat(2, 1), cache, ints(1, -1), torch.tensor([3, 0])])
        want = torch.full_like(state, 0xA5)
        want[32 + 3 * 528 : 32 + 4 * 528] = sentinel(528)
        assert_same(state, want)

        def read(cache: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return swa.ring_read_raw(cache, ids, at, spec=spec)

        got = run(read, [cache, ints(1), torch.tensor([3])])
        # compiled code reads bf16 by way of fp32, which keeps a NaN but not which NaN it is
        torch.testing.assert_close((got if run is eager else got[0])[0, 1], entry, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 448, 512])
@pytest.mark.parametrize("rows", [1, 4])
def test_records_of_every_size(monkeypatch: pytest.MonkeyPatch, dim: int, rows: int) -> None:
    """B10, E6: tiles of 64, 128, 256 and 512 columns, 1 and 4 records high: data and scales from their own region."""
    monkeypatch.setattr(lowerings.gather, "config", lambda widest: {"BLOCK_N": rows, "num_warps": 4, "num_stages": 1})
    case = Case("any", swa.RingSpec(3, 1, dim, shared_kv=True, ring_rows=3), 1, torch.float32)
    size = case.spec.record_bytes
    state = torch.full((32 + 3 * size + 32,), 0xFF, dtype=torch.uint8)
    cache = state[32:-32].view(case.spec.cache_shape(1)).copy_(sentinel(3 * size).view(1, 3, 1, size))
    want = records.decode(cache[0, [1, 2, 0]], "mxfp8")  # positions 1 to 3
    got = sm_90(gather_op(case), [cache, ints(0), torch.tensor([4]), None, None, None])[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256, 448, 512])
def test_stores_keep_to_their_record(dim: int) -> None:
    """B10, E6: one record between guards; the others keep every byte."""
    case = Case("any", swa.RingSpec(3, 1, dim, shared_kv=True), 1)
    k, _, _ = vectors(case, 1)
    cache = torch.full(case.spec.cache_shape(1), 0xA5, dtype=torch.uint8)
    want = cache.clone()
    want[0, 2] = records.encode_record(k, None, "mxfp8", 1e-4)[0]
    sm_90(store_op(case), [k, None, cache, ints(0), torch.tensor([6])])
    assert_same(cache, want)


@pytest.mark.parametrize("reuse", [True, False])
def test_temporaries_of_the_size_of_k(reuse: bool) -> None:
    """C6: a buffer of k's size and lifetime is needed again between store and attention; planned with and without."""
    case = Case("toy", swa.RingSpec(20, 2, 64, shared_kv=True), 2)
    x = decode_inputs(case)
    g = torch.Generator().manual_seed(3)
    weight = torch.randint(-1, 2, (64, 64), generator=g).bfloat16()

    def fn(weight: torch.Tensor, k: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, *meta: torch.Tensor):  # noqa: ANN202
        new = torch.mm(k[:, 0], weight)
        store_op(case)(new[:, None], None, cache, *meta)
        other = torch.mm(torch.mm(q[:, 0], weight), weight.t())
        out = attention_op(case, return_lse=False)(q + other[:, None], cache, *meta, None, None)
        return out, other

    args = [weight, *(x[n] for n in ("k", "q", "cache", "state_ids", "positions"))]
    code = generate_code(fn, *args, options={"allow_buffer_reuse": reuse})
    assert ("# reuse" in code.call) == reuse
    wanted = [a.clone() for a in args]
    want, want_other = fn(*wanted)
    out, other = run_on_cpu(code, args)
    assert_same(args[3], wanted[3])
    torch.testing.assert_close(other, want_other, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, want, rtol=3e-2, atol=3e-2)


def compiled(fn: Callable, args: list) -> tuple:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True)(*args)


@pytest.mark.parametrize("run", [compiled, sm_90])
def test_bytes_are_reinterpreted_inside_compiled_code(run: Callable) -> None:
    """C12: a cache that the caller allocated as fp32 is written as bytes, codes are read as e4m3fn: the same bits."""
    case = Case("one", swa.RingSpec(4, 1, 64, shared_kv=True, ring_rows=4), 1, torch.float32)
    numbers = swa.RingSpec(4, 1, 64, shared_kv=True, ring_rows=4, kv_format="fp32")

    def fn(k: torch.Tensor, cache: torch.Tensor, floats: torch.Tensor, *meta: torch.Tensor) -> tuple:
        store_op(case)(k, None, cache, *meta)
        swa.store(k, None, floats.view(torch.uint8), *meta, spec=numbers)
        return cache[..., :64].view(torch.float8_e4m3fn).float(), floats + 1

    def args() -> list:
        cache, floats = torch.zeros(case.spec.cache_shape(1)).byte(), 16 * torch.arange(256.0).view(1, 4, 1, 64)
        return [vectors(case, 1)[0], cache, floats, ints(0), torch.tensor([6])]

    wanted, given = args(), args()
    want, got = fn(*wanted), run(fn, given)
    for value, expected in zip([*given[1:3], *got], [*wanted[1:3], *want], strict=True):
        assert_same(value, expected)
    assert wanted[1][0, 2].any() and torch.equal(wanted[2][0, 2, 0], wanted[0][0, 0])


@pytest.mark.parametrize("name", [n for n in OPS if "store" in n or n.endswith(".out")])
def test_nothing_that_writes_is_tried_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4: one choice, also under max_autotune, and no copy of a pool to try on; a second run changes no byte."""
    seen, select = [], _inductor.autotune_select_algorithm

    def record(op: str, choices: list, *args: object, **kwargs: object) -> object:
        seen.append(len(choices))
        return select(op, choices, *args, **kwargs)

    monkeypatch.setattr(_inductor, "autotune_select_algorithm", record)
    fn, args = op_calls(V4)[name]
    code = generate_code(fn, *args, options={"max_autotune": True})
    assert seen == [1] and [k for k in code.kernels if "template" not in code.kernel_source(k)] == []
    run_on_cpu(code, args)
    once = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    run_on_cpu(code, args)
    for value, was in zip(args, once, strict=True):
        assert value is was or torch.equal(value, was)


def gpu(fn: Callable, args: list) -> tuple:
    there = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    out = compiled(fn, there)
    for a, b in zip(args, there, strict=True):
        if isinstance(a, torch.Tensor):
            a.copy_(b)
    return out


@pytest.mark.parametrize("run", [eager, compiled, sm_90, pytest.param(gpu, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_bf16_value_is_stored_alike(run: Callable, mixed: bool) -> None:
    """E11: all 65,536, blocks of neighbours or of mixed magnitudes, as torch casts them: no carry of a tie is lost."""
    case = Case("all", swa.RingSpec(128, 1, 512, shared_kv=True), 1)
    bits = torch.arange(65536).view(32, 2048).t() if mixed else torch.arange(65536)
    k = bits.reshape(128, 1, 512).short().view(torch.bfloat16)
    cache = torch.zeros(case.spec.cache_shape(1), dtype=torch.uint8)
    run(store_op(case), [k, None, cache, torch.zeros(128).int(), torch.arange(128)])
    blocks = k.double().view(128, 16, 32)
    amax = blocks.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(-1).clamp(min=1e-4)
    scale = torch.where(amax.isinf(), 127, (amax / 448).log2().ceil().clamp(-126, 127))
    data = (blocks * torch.exp2(-scale)[..., None]).clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    got, nan = cache[0, :128, 0], blocks.isnan().flatten(1)
    assert torch.equal(got[:, 512:], (scale + 127).byte())
    assert torch.equal(got[:, :512][~nan], data.flatten(1)[~nan]) and (got[:, :512][nan] == 0x7F).all()


@pytest.mark.parametrize("name", [n for n in OPS if n != "prefill_plan"])  # its T is a number: see test_prefill_plan
def test_no_tokens_for_code_of_any_number(name: str) -> None:
    """F12, E11: code for any number of tokens, run with none: empty grids and outputs, no byte of a cache changes."""
    if name == "decode_index" and torch.__version__ < "2.13":
        pytest.skip("this Inductor divides by its number of rows; torch guards sizes 0 and 1, so few meet it")
    case = BY_NAME["gpt-oss"]
    fn, some = op_calls(case, 7)[name]
    none = op_calls(case, 0)[name][1]
    pairs = enumerate(zip(some, none, strict=True))
    dynamic = [i for i, (a, b) in pairs if isinstance(a, torch.Tensor) and len(a) != len(b)]
    code = generate_code(fn, *some, dynamic_inputs=dynamic)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in none]
    want = fn(*[a.clone() if isinstance(a, torch.Tensor) else a for a in none])
    got = run_on_cpu(code, none)
    want = want if isinstance(want, tuple) else () if want is None else (want,)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want]
    if "out" not in name.split("."):
        for value, was in zip(none, before, strict=True):
            assert value is was or torch.equal(value, was)


@pytest.mark.parametrize("position", [5, 127, 128, 1000])
def test_a_mask_of_flex_attention_says_the_same(position: int) -> None:
    """E10: ring, index, and FlexAttention over a longer cache whose mask is the same for all heads: equal outputs."""
    spec = swa.RingSpec(128, 1, 64, num_kv_heads=2, kv_format="fp32")
    case = Case("flex", spec, 4, torch.float32)
    k, v, q = vectors(case, position + 1)
    q, ids, at = q[-1:], ints(0), torch.tensor([position])
    cache = torch.full(spec.cache_shape(1), 0xFF, dtype=torch.uint8)
    swa.store(k, v, cache, torch.zeros(position + 1, dtype=torch.int32), torch.arange(position + 1), spec=spec)
    by_ring = swa.attention(q, cache, ids, at, spec=spec)
    _, index = swa.decode_index(ids, at, spec=spec, num_slots=1)
    by_index = swa.attention_index(q, cache, index, kv_format="fp32", v_head_dim=64)

    def window(b: object, h: object, q_at: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= q_at + position) & (key > q_at + position - 128)

    unwritten = torch.full((128, 2, 64), 1e3)
    keys, values = (torch.cat([x, unwritten]).transpose(0, 1)[None] for x in (k, v))
    mask = create_block_mask(window, None, None, 1, keys.shape[2], device="cpu")
    by_flex = flex_attention(q[None].transpose(1, 2), keys, values, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    for out in (by_index, by_flex):
        torch.testing.assert_close(out, by_ring, rtol=1e-5, atol=1e-5)


IDS = {
    "A": (1, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 19, 20),
    "B": (1, 2, 3, 5, 6, 8, 10, 11, 12),
    "C": (1, 3, 4, 6, 7, 8, 9, 11, 12, 13, 15, 16),
    "D": (1, 2, 3, 5, 7, 8, 9, 11, 12, 13),
    "E": (1, 2, 3, 4, 6, 8, 10, 11, 12, 13),
    "F": (1, 2, 4, 5, 6, 7, 9, 10, 12, 14),
}


def named_tests() -> dict[str, list[str]]:
    """Tests by the ids in their docstrings."""
    tests: dict[str, list[str]] = {f"{kind}{n}": [] for kind, numbers in IDS.items() for n in numbers}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for id_ in set(re.findall(r"\b[A-F]\d{1,2}\b", ast.get_docstring(node) or "")) & tests.keys():
                    tests[id_].append(f"{path.name}::{node.name}")
    return tests


def test_every_fault_is_named_in_a_test() -> None:
    assert [id_ for id_, tests in named_tests().items() if not tests] == []


if __name__ == "__main__":  # `python tests/test_faults.py` says which test holds which fault, and which none does
    for id_, tests in named_tests().items():
        print(id_, *(tests or ["NO TEST"]), sep="\n    " if len(tests) > 1 else "  ")
