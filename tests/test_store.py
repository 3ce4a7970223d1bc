"""swa_inductor::store: who writes what, in eager mode, in compiled C++ and in the generated sm_90 source."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, CASES, EPS, STORE_ARGS, TURN_ARGS, Case, decode_inputs, norm_inputs, store_op, vectors
from numerics import assert_same
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor import records
from swa_inductor.reference_rope import norm_rope
from swa_inductor.testing import generate_code, run_on_cpu

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def plain_store(case: Case, k: torch.Tensor, v: torch.Tensor | None, cache: torch.Tensor, ids: list, at: list) -> None:
    """The rule as a loop: the last token of a row wins, padded tokens write nothing."""
    for t, (slot, p) in enumerate(zip(ids, at, strict=True)):
        if slot >= 0:
            one = slice(t, t + 1)
            record = records.encode_record(k[one], None if v is None else v[one], case.spec.kv_format, 1e-4)
            cache[slot, p % case.spec.rows] = record[0]


def run_eager(case: Case, args: list) -> None:
    store_op(case)(*args)


def run_cpp(case: Case, args: list) -> None:
    torch._dynamo.reset()
    torch.compile(store_op(case), fullgraph=True)(*args)


def run_generated(case: Case, args: list) -> None:
    run_on_cpu(generate_code(store_op(case), *args), args)


RUNS = {"eager": run_eager, "cpp": run_cpp, "sm_90": run_generated}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@every_case
def test_bytes(case: Case) -> None:
    """A decode step with a padded sequence: the same bytes in every implementation, nothing else touched."""
    x = decode_inputs(case)
    want = x["cache"].clone()
    plain_store(case, x["k"], x["v"], want, x["state_ids"].tolist(), x["positions"].tolist())
    assert not torch.equal(want, x["cache"])
    for name, run in RUNS.items():
        if name == "cpp" and case.name not in ("v4", "gpt-oss", "gemma3-fp32"):
            continue  # a C++ compile takes seconds; the three cover the formats
        cache = x["cache"].clone()
        run(case, [cache if arg == "cache" else x[arg] for arg in STORE_ARGS])
        assert_same(cache, want)


@every_run
@pytest.mark.parametrize("name", ["v4", "narrow-v"])
def test_prefill_keeps_the_last_rows(name: str, run) -> None:  # noqa: ANN001
    """A4: of q_len > R tokens only the last R are written, also for two sequences with padding between them."""
    case = BY_NAME[name]
    rows = case.spec.rows
    first, second = 2 * rows + 3, rows
    ids = [0] * first + [-1] * 5 + [3] * second
    at = list(range(10, 10 + first)) + [-1] * 5 + list(range(second))
    k, v, _ = vectors(case, len(ids))
    cache = torch.randint(0, 256, case.spec.cache_shape(4), dtype=torch.uint8)
    want = cache.clone()
    plain_store(case, k, v, want, ids, at)
    run(case, [k, v, cache, torch.tensor(ids, dtype=torch.int32), torch.tensor(at)])
    assert_same(cache, want)


@every_run
def test_padded_tokens_write_no_byte(run) -> None:  # noqa: ANN001
    """A16, F9: padding among live tokens, and a call that holds nothing but padding."""
    case = BY_NAME["v4"]
    k, v, _ = vectors(case, 8)
    start = torch.randint(0, 256, case.spec.cache_shape(4), dtype=torch.uint8)
    for ids in ([3, -1, -1, 0, -1, 1, -1, -1], [-1] * 8):
        cache, want = start.clone(), start.clone()
        at = [133, 0, 0, 0, 0, 70, 0, 0]
        plain_store(case, k, v, want, ids, at)
        run(case, [k, v, cache, torch.tensor(ids, dtype=torch.int32), torch.tensor(at)])
        assert_same(cache, want)


@pytest.mark.parametrize("run", [run_cpp, run_generated])
@pytest.mark.parametrize(("slot", "position"), [(4, 0), (2**31 - 1, 0), (1, -1), (1, -134), (-7, 3)])
def test_bad_device_metadata_writes_nothing(run, slot: int, position: int) -> None:  # noqa: ANN001
    """F14: compiled code treats what eager mode refuses as padding."""
    case = BY_NAME["v4"]
    k, v, _ = vectors(case, 2)
    cache = torch.randint(0, 256, case.spec.cache_shape(4), dtype=torch.uint8)
    want = cache.clone()
    plain_store(case, k[1:], None, want, [2], [5])
    run(case, [k, v, cache, torch.tensor([slot, 2], dtype=torch.int32), torch.tensor([position, 5])])
    assert_same(cache, want)


@every_run
def test_strided_cache(run) -> None:  # noqa: ANN001
    """B11: a layer's view of a state buffer with a storage offset; bytes outside the view keep their value."""
    case = BY_NAME["v4"]
    k, v, _ = vectors(case, 2)
    state = torch.randint(0, 256, (4, 200_000), dtype=torch.uint8)
    before = state.clone()
    ids, at = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([873, 5])

    def view(buffer: torch.Tensor) -> torch.Tensor:
        return buffer[:, 70_752 : 2 * 70_752].view(case.spec.cache_shape(4))

    run(case, [k, v, view(state), ids, at])
    plain_store(case, k, v, view(before), ids.tolist(), at.tolist())
    assert_same(state, before)
    assert torch.equal(state.flatten()[707_184 : 707_184 + 528], view(state)[3, 69, 0])


@every_run
def test_special_values(run) -> None:  # noqa: ANN001
    """B1, B6, B12: zeros, subnormals, NaN, infinities and ties give the same bytes everywhere."""
    case = BY_NAME["fp32-mxfp8"]
    g = torch.Generator().manual_seed(3)
    k = torch.randn(8, 1, 128, generator=g) * torch.exp2(torch.randint(-140, 120, (8, 1, 128), generator=g).float())
    k[0] = 0.0
    k[1, 0, :8] = torch.tensor([448.0, 464.0, 465.0, -1e9, float("inf"), float("nan"), -0.0, 1e-42])
    k[2, 0, 32:64] = 1e-30
    k[3] = torch.tensor([448.0, 1.0625, 1.0625001, 126.24] * 32)
    k[4, 0, 5] = float("-inf")
    cache = torch.zeros(case.spec.cache_shape(1), dtype=torch.uint8)
    want = cache.clone()
    ids, at = [0] * 8, list(range(8))
    plain_store(case, k, None, want, ids, at)
    run(case, [k, None, cache, torch.zeros(8, dtype=torch.int32), torch.arange(8)])
    assert_same(cache, want)


@every_run
def test_no_tokens(run) -> None:  # noqa: ANN001
    """F12: T = 0 writes nothing."""
    case = BY_NAME["v4"]
    k, v, _ = vectors(case, 0)
    cache = torch.randint(0, 256, case.spec.cache_shape(1), dtype=torch.uint8)
    before = cache.clone()
    run(case, [k, v, cache, torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)])
    assert_same(cache, before)


def test_storing_twice_changes_nothing() -> None:
    case = BY_NAME["mimo"]
    x = decode_inputs(case)
    args = [x[n] for n in STORE_ARGS]
    store_op(case)(*args)
    once = x["cache"].clone()
    store_op(case)(*args)
    assert_same(x["cache"], once)


def test_rejected_drafts_are_overwritten_before_they_are_read() -> None:
    """A9: whatever part of a step is accepted, the next step reads what a run without drafts reads."""
    case = BY_NAME["v4"]
    spec = case.spec
    k, _, _ = vectors(case, 2000, seed=5)
    drafts, _, _ = vectors(case, 6, seed=6)

    def put(cache: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        n = len(rows)
        swa.store(rows, None, cache, torch.zeros(n, dtype=torch.int32), torch.arange(start, start + n), spec=spec)

    for accepted in range(1, 7):
        cache, clean = (torch.zeros(spec.cache_shape(1), dtype=torch.uint8) for _ in range(2))
        put(cache, k[:1000], 0)
        put(cache, torch.cat([k[1000 : 1000 + accepted], drafts[accepted:]]), 1000)
        put(cache, k[1000 + accepted : 1006 + accepted], 1000 + accepted)
        put(clean, k[: 1006 + accepted], 0)
        for p in range(1000 + accepted, 1006 + accepted):
            rows = torch.arange(p - 127, p + 1) % spec.rows
            assert torch.equal(cache[0, rows], clean[0, rows])


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_producers_fuse_into_the_store(name: str) -> None:
    """One kernel from the projection's output to the ring: no intermediate, no copy of the cache."""
    case = BY_NAME[name]
    x = decode_inputs(case)

    def fn(k: torch.Tensor, v: torch.Tensor | None, *rest: torch.Tensor) -> None:
        store_op(case)(torch.sin(k.float()).to(k.dtype) * 2, None if v is None else v + 1, *rest)

    args = [x[n] for n in STORE_ARGS]
    code = generate_code(fn, *args)
    FileCheck().check_count(".run(", 1, exactly=True).check_not("extern_kernels").run(code.call)
    assert code.allocations == []
    want = x["cache"].clone()
    fn(x["k"], x["v"], want, *args[3:])
    run_on_cpu(code, args)
    # sin differs between libraries in the last bit of fp32, which rarely moves a bf16 value
    assert (x["cache"] != want).float().mean() < 1e-4


def test_slice_of_a_merged_projection_fuses() -> None:
    """K is the tail of [q_a | kv]: read in place by the store."""
    case = BY_NAME["v4"]
    x = decode_inputs(case)
    merged = torch.randn(len(x["k"]), 1536 + 512).bfloat16()

    def fn(merged: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        q_a, kv = merged.split([1536, 512], -1)
        store_op(case)((kv * 0.5)[:, None], None, *rest)
        return q_a

    args = [merged, *(x[n] for n in STORE_ARGS[2:])]
    code = generate_code(fn, *args)
    FileCheck().check_count(".run(", 1, exactly=True).run(code.call)
    want = x["cache"].clone()
    fn(merged, want, *args[2:])
    run_on_cpu(code, args)
    assert_same(x["cache"], want)


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_a_producer_that_reads_the_cache_runs_before_the_store(name: str) -> None:
    """Fused, it would read rows that other programs of the store have written already."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    tokens, spec = 12, case.spec
    ids, at = torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens)

    def fn(cache: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> None:
        old = cache[0, :tokens, :, : spec.head_dim].flip(0).to(case.dtype)
        swa.store(old, None if spec.shared_kv else old + 1, cache, ids, at, spec=spec)

    want = x["cache"].clone()
    fn(want, ids, at)
    code = generate_code(fn, x["cache"], ids, at)
    run_on_cpu(code, (x["cache"], ids, at))
    assert_same(x["cache"], want)


# name, eps, whether there is a weight, rope_dim (0: no RoPE), adjacent pairs
TURNS = [
    ("v4", EPS, True, 64, True),
    ("gemma3", EPS, True, 256, False),
    ("gpt-oss", None, False, 64, False),
    ("mimo", EPS, False, 0, True),
    ("mha-fp16", None, False, 2, True),
]


@pytest.mark.parametrize(("name", "eps", "weight", "rope_dim", "interleaved"), TURNS)
def test_norm_and_rope(name: str, eps: float | None, weight: bool, rope_dim: int, interleaved: bool) -> None:
    """Either, both, with and without weight: K alone is normalised and rotated, in every implementation alike."""
    case = BY_NAME[name]
    x = norm_inputs(case, decode_inputs(case), rope_dim=rope_dim or 2)
    x["norm_weight"], x["rope"] = x["norm_weight"] if weight else None, x["rope"] if rope_dim else None
    want = x["cache"].clone()
    k = norm_rope(x["k"], x["positions"], x["norm_weight"], eps, x["rope"], interleaved)
    assert not torch.equal(k, x["k"])
    plain_store(case, k, x["v"], want, x["state_ids"].tolist(), x["positions"].tolist())
    op = store_op(case, eps, interleaved)
    for how in ("eager", "cpp", "sm_90"):
        if how == "cpp" and name not in ("gemma3", "mimo"):
            continue
        torch._dynamo.reset()
        cache = x["cache"].clone()
        args = [cache if n == "cache" else x[n] for n in TURN_ARGS]
        if how == "sm_90":
            code = generate_code(op, *args)
            run_on_cpu(code, args)
            assert code.launches == code.launches[:1] and not code.allocations
        else:
            (torch.compile(op, fullgraph=True) if how == "cpp" else op)(*args)
        assert_same(cache, want)


def test_without_norm_and_rope_the_kernel_knows_of_neither() -> None:
    case = BY_NAME["gpt-oss"]
    x = norm_inputs(case, decode_inputs(case))
    for op, some in ((store_op(case), False), (store_op(case, EPS), True)):
        code = generate_code(op, *(x[n] if some or n in STORE_ARGS else None for n in TURN_ARGS))
        (kernel,) = code.kernels
        body = code.kernel_source(kernel)
        assert all((word in body) == some for word in ("rsqrt", "arg_ROPE", "tl.split", "arg_NORM_WEIGHT"))
