"""What holds for every registered op: schema, fake, trace, compile, and no copy of the cache."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import (
    ATTENTION_ARGS,
    BY_NAME,
    GATHER_ARGS,
    NORM_STORE_ARGS,
    PREFILL_ARGS,
    STORE_ARGS,
    Case,
    attention_op,
    cast_back_op,
    declared_as_written,
    decode_inputs,
    gather_op,
    index_op,
    inlined_calls,
    norm_inputs,
    norm_store_op,
    prefill_op,
    prepare_calls,
    store_op,
    template_launches,
    workspace_op,
)
from numerics import assert_same
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import FileCheck
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import swa_inductor as swa
from swa_inductor.lowerings import _inductor
from swa_inductor.meta._library import OPS
from swa_inductor.testing import generate_code, run_on_cpu

OP_CASES = [BY_NAME[name] for name in ("v4", "gpt-oss", "mimo", "odd-group", "v4+-few-heads", "96+")]
CLOSE = {"rtol": 3e-2, "atol": 3e-2}
every_case = pytest.mark.parametrize("case", OP_CASES, ids=lambda c: c.name)


def op_calls(case: Case, tokens: int | None = None) -> dict[str, tuple[Callable, list]]:
    """A call of every op: public function over the geometry, and its arguments, for `tokens` tokens (None: a step)."""
    x = decode_inputs(case)
    if tokens is not None:
        index = torch.arange(tokens) % len(x["q"])
        for name in ("k", "v", "q", "state_ids", "positions", "valid_start"):
            x[name] = None if x[name] is None else x[name][index]
        # distinct rows: one token of each slot is live, the rest are padding
        x["state_ids"] = torch.where(torch.arange(tokens) < case.slots, torch.arange(tokens), -1).int()
        x["positions"] = x["positions"].clamp(min=0)
    step, turned = None if tokens is None else 1, norm_inputs(case, x, rope_dim=32, rows=10**4)
    return {
        "store": (store_op(case), [x[n] for n in STORE_ARGS]),
        "store_cast_back": (cast_back_op(case), [x[n] for n in STORE_ARGS]),
        "norm_store": (norm_store_op(case), [turned[n] for n in NORM_STORE_ARGS]),
        "attention": (attention_op(case, tokens_per_step=step), [x[n] for n in ATTENTION_ARGS]),
        **prefill_calls(case, x),
        **inlined_calls(case, x),
        **prepare_calls(case, 5 if tokens is None else tokens),
    }


def prefill_calls(case: Case, x: dict) -> dict[str, tuple[Callable, list]]:
    """Calls of the ops of a prefill over the tokens of `x`, each a sequence of its own at its position."""
    sequences = x["state_ids"].shape[0]
    starts = x["positions"].clamp(min=0)
    x = dict(x, q_starts=starts, slots=x["state_ids"], starts=starts, lower=x["valid_start"])
    w = case.spec.window
    own = torch.arange(sequences, dtype=torch.int32)
    pivots = torch.stack(
        [own * w, own.new_full((sequences,), w), own + sequences * w, own.new_full((sequences,), 1)], 1
    )
    workspace = torch.zeros(sequences * (w + 1), case.spec.num_kv_heads, case.spec.head_dim, dtype=case.dtype)
    values = None if x["v"] is None else workspace.new_zeros(*workspace.shape[:2], case.spec.v_head_dim)
    pivots = pivots.clamp(min=0)
    index = torch.arange(3 * sequences, dtype=torch.int32).view(sequences, 3) - 1
    return {
        "attention_prefill": (prefill_op(case), [x[n] for n in PREFILL_ARGS]),
        "gather": (gather_op(case), [x[n] for n in GATHER_ARGS]),
        "attention_workspace": (workspace_op(case), [x["q"], workspace, values, pivots, x["sinks"]]),
        "attention_index": (index_op(case), [x["q"], x["cache"], index, x["sinks"]]),
    }


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.swa_inductor, packet), which or "default")


def has_template(name: str) -> bool:
    return hasattr(getattr(swa.lowerings, name.split(".")[0]), "TEMPLATE")


def raw_call(name: str, fn: Callable, args: list) -> tuple[Callable, tuple, dict]:
    """The call of the op itself that the public function makes."""
    seen = {}
    op = overload(name)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN202
            if func is op:
                seen["call"] = (args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Spy():
        fn(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    return op, *seen["call"]


def test_every_op_is_covered_here() -> None:
    assert sorted(op_calls(OP_CASES[0])) == sorted(OPS)


@pytest.mark.parametrize("name", OPS)
@every_case
def test_opcheck(name: str, case: Case) -> None:
    op, args, kwargs = raw_call(name, *op_calls(case)[name])
    results = torch.library.opcheck(op, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("name", OPS)
def test_mutation_is_declared_once(name: str) -> None:
    """C4: exactly the cache of a mutating op, or every buffer of an `out` overload, is written; the schema says so."""
    schema = overload(name)._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if name.endswith(".out"):
        results = overload(name.removesuffix(".out"))._schema.returns
        assert written == [r.name for r in results] and not schema.returns
    else:
        assert written == (["cache"] if "store" in name else [])


def describe(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    return [describe(v) for v in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", OPS)
@every_case
@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 129])
def test_fake_is_real(name: str, case: Case, tokens: int) -> None:
    """C8, C9, C16: shape, stride, dtype and offset; tracing never reads data."""
    fn, args = op_calls(case, tokens)[name]
    real = fn(*args)
    with FakeTensorMode() as mode:
        fake = fn(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert describe(real) == describe(fake)


@pytest.mark.parametrize("name", OPS)
def test_one_compile_for_every_number_of_tokens(name: str) -> None:
    """C13: a dynamic token dim compiles once and W, R and the record stay literals of the code."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled, spec = None, BY_NAME["gpt-oss"].spec
    for tokens in (5, 2, 129, 7, 12):
        fn, args = op_calls(BY_NAME["gpt-oss"], tokens)[name]
        compiled = compiled or torch.compile(fn, fullgraph=True, backend=counter)
        eager_args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        for a in args:
            # tokens, rows of a workspace or of whole steps; neither the 4 slots of a cache nor the 16 heads
            if isinstance(a, torch.Tensor) and a.shape[0] in (tokens, tokens * (spec.window + 1), tokens * 4):
                torch._dynamo.mark_dynamic(a, 0)
        got, want = compiled(*args), fn(*eager_args)
        for value, expected in zip([*args, got], [*eager_args, want], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1


def test_few_compiles_without_marks() -> None:
    """C13: sizes 0 and 1 are guarded by torch; any other size shares one dynamic graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    case = BY_NAME["v4"]
    compiled = torch.compile(op_calls(case, 2)["store"][0], fullgraph=True, backend=counter)
    for tokens in (2, 6, 1, 6, 12, 1, 0, 7, 30, 2):
        compiled(*op_calls(case, tokens)["store"][1])
    assert counter.frame_count <= 4


def cpu_code(fn: Callable, args: list) -> str:
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(fn, fullgraph=True), *args)
    return code[code.index("def call(") :]


def cpu_bytes(code: str) -> list[int]:
    """Bytes of the buffers that a CPU wrapper allocates (an upper bound of 8 bytes a value)."""
    sizes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", code)
    return [8 * int(torch.tensor([int(x) for x in s.split(",") if x.strip()] or [1]).prod()) for s in sizes]


def chain(case: Case, layers: int = 2) -> tuple[Callable, list]:
    """Store and attend in two layers whose rings are views of one state buffer, sliced inside the function (C1)."""
    x = decode_inputs(case)
    ring = case.spec.ring_bytes
    pad = -ring % 32
    state = torch.randint(0, 120, (600, layers * (ring + pad)), dtype=torch.uint8)

    def fn(state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *meta: torch.Tensor):  # noqa: ANN202
        for i in range(layers):
            begin = i * (ring + pad)
            cache = state[:, begin : begin + ring].view(case.spec.cache_shape(len(state)))
            store_op(case)(k, v, cache, *meta)
            q = attention_op(case, return_lse=False)(q, cache, *meta, None, None)
        return q

    return fn, [state, x["q"], x["k"], x["v"], x["state_ids"], x["positions"]]


@pytest.mark.parametrize("name", ["v4", "odd-group"])
def test_no_cache_sized_copy_on_the_cpu(name: str) -> None:
    case = BY_NAME[name]
    fn, args = chain(case)
    if case.spec.v_head_dim is not None:
        assert case.spec.v_head_dim == case.spec.head_dim  # the chain feeds outputs back as queries
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected = fn(*want)
    code = cpu_code(fn, args)
    assert max(cpu_bytes(code)) < args[0].numel()
    FileCheck().check_not("swa_inductor.store").run(code)
    state = args[0]
    # run_and_get_code has run the compiled function once on `args`
    assert_same(state, want[0])
    args[0] = state
    assert torch.compile(fn, fullgraph=True)(*args).shape == expected.shape


@pytest.mark.parametrize("name", ["v4", "odd-group"])
@pytest.mark.parametrize("reuse", [True, False])
def test_no_cache_sized_copy_on_a_gpu(name: str, reuse: bool) -> None:
    """C1, C4, C6: one kernel per op, in order, no allocation of the cache's size; buffer reuse changes nothing."""
    case = BY_NAME[name]
    fn, args = chain(case)
    options = {"allow_buffer_reuse": reuse}
    code, with_static = (generate_code(fn, *args, static_inputs=s, options=options) for s in ((), (0,)))
    for part in ("call", "kernels"):  # so that it is enough to run one of them
        assert getattr(code, part) == getattr(with_static, part)
    assert all(code.kernel_source(name) == with_static.kernel_source(name) for name in code.kernels)
    order = ["store" if "store" in launch else "attention" for launch in template_launches(code)]
    assert order == ["store", "attention"] * 2
    for allocation in code.allocations:
        size = 8
        for dim in allocation.size:
            size *= int(dim)
        assert size <= args[0].numel() / 10
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected = fn(*want)
    out, *_ = run_on_cpu(code, args)
    assert_same(args[0], want[0])
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("case_name", ["v4", "gpt-oss"])
def test_no_op_allocates_what_a_cache_takes(name: str, case_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: with a cache of thousands of slots, all buffers of an op together are smaller than it, and on the device.

    Of its arguments a kernel is known to write those that the schema says, of its buffers all beside the output.
    """
    fn, args = op_calls(BY_NAME[case_name])[name]
    large = [
        torch.zeros(4000, *a.shape[1:], dtype=torch.uint8) if isinstance(a, torch.Tensor) and a.dim() == 4 else a
        for a in args
    ]
    written = declared_as_written(monkeypatch)
    code = generate_code(fn, *large)
    sizes = [8 * math.prod(int(n) for n in a.size) for a in code.allocations]
    cache_bytes = 4000 * BY_NAME[case_name].spec.ring_bytes
    assert sum(sizes) < cache_bytes / 2
    assert not any(other in code.call for other in ("extern_kernels", "copy_(", "_cpu("))
    op, _, options = raw_call(name, fn, args)
    schema = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    arguments = sum(options.get(argument, args) is not None for argument in schema)
    packet, template = name.split(".")[0], has_template(name)
    output = packet not in ("store", "prepare_decode")  # whose template has one that nobody reads: it takes no memory
    of_caller = {buffer for buffer in written if buffer.startswith("arg")}
    assert len(of_caller) == (arguments if template else 0)
    assert len(written - of_caller) == (sum(map(bool, sizes)) - output if template else 0)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_every_argument_may_be_computed(name: str, on_gpu: bool) -> None:
    """A cache, a list or a table that the compiled function makes itself: an op reads and writes that one."""
    op, *given = raw_call(name, *op_calls(BY_NAME["v4"], 7)[name])
    leaves, form = tree_flatten(tuple(given))
    args = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(*args: torch.Tensor) -> tuple:
        made = [a.neg().neg() for a in args]
        rest = iter(made)
        args, options = tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], form)
        out = op(*args, **options)  # alone, where there is one: what has two users is put into memory by Inductor
        return tuple(made if out is None or "." in name else tree_leaves(out))

    torch._dynamo.reset()
    want = call(*args)
    got = run_on_cpu(generate_code(call, *args), args) if on_gpu else torch.compile(call, fullgraph=True)(*args)
    for out, expected in zip(got, want, strict=True):
        exact = not on_gpu or not out.is_floating_point()
        torch.testing.assert_close(out, expected, equal_nan=True, **({"rtol": 0, "atol": 0} if exact else CLOSE))


def test_a_snapshot_taken_before_a_store_stays_old() -> None:
    """C3: a clone of the cache feeds attention after the store: the clone is not optimised into the cache."""
    case = BY_NAME["v4"]
    x = decode_inputs(case)
    meta = (x["state_ids"], x["positions"])

    def fn(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, *meta: torch.Tensor) -> torch.Tensor:
        snapshot = cache.clone()
        store_op(case)(k, None, cache, *meta)
        return attention_op(case, return_lse=False)(q, snapshot, *meta, None, x_sinks)

    x_sinks = x["sinks"]
    want = fn(x["q"], x["k"], x["cache"].clone(), *meta)
    torch._dynamo.reset()
    got = torch.compile(fn, fullgraph=True)(x["q"], x["k"], x["cache"].clone(), *meta)
    assert_same(got, want)


def test_code_is_the_same_with_autotuning_and_wrappers() -> None:
    """E13: our counts hold with max_autotune on."""
    case = BY_NAME["gemma3"]
    for name, (fn, args) in op_calls(case).items():
        for options in ({}, {"max_autotune": True}):
            code = generate_code(fn, *args, options=options)
            assert "extern_kernels" not in code.call and "torch.ops" not in code.call
            if has_template(name):
                assert len(template_launches(code)) == 1 and name.split(".")[0] in template_launches(code)[0]


@pytest.mark.parametrize(
    ("op", "sizes", "meta", "programs"),
    [
        ("store", (5, 3), {"BLOCK_M": 2}, (8, 1, 1)),
        ("norm_store", (5, 3), {"BLOCK_M": 2}, (8 + 5, 1, 1)),
        ("gather", (35, 3), {"BLOCK_N": 16}, (7, 1, 1)),
        ("attention", (20, 3), {"D": 6, "ROW_BLOCKS": 2, "SPLITS": 5}, (4 * 2, 3, 5)),
        ("_attention_sm90", (24,), {"TOKENS": 6, "HEAD_BLOCKS": 3, "SPLITS": 0}, (4 * 3, 1, 1)),
        ("_attention_sm90", (24,), {"TOKENS": 1, "HEAD_BLOCKS": 3, "SPLITS": 4}, (24 * 3, 4, 1)),
        ("attention_index", (5, 3), {"ROW_BLOCKS": 2}, (10, 3, 1)),
        ("attention_prefill", (35, 3), {"BLOCK_T": 16, "HEAD_BLOCKS": 2}, (3, 6, 1)),
        ("attention_workspace", (35, 3), {"BLOCK_T": 16, "HEAD_BLOCKS": 2}, (3, 6, 1)),
        ("prepare_decode", (5, 6, 0), {"BLOCK_M": 16, "BLOCK_N": 1}, (1 + 2, 1, 1)),
        ("prepare_decode", (5, 6, 133), {"BLOCK_M": 16, "BLOCK_N": 128}, (1 + 2, 2, 1)),
        ("prepare_decode", (0, 6, 133), {"BLOCK_M": 16, "BLOCK_N": 128}, (1, 2, 1)),
    ],
)
def test_programs_of_a_launch(op: str, sizes: tuple, meta: dict[str, int], programs: tuple[int, int, int]) -> None:
    """As many as have something to do: what a program too many does again shows in no result."""
    assert _inductor.SymbolicGridFn(getattr(swa.lowerings, op).grid)(*sizes, meta) == programs


def test_recorded_graphs_are_those_of_all_paths() -> None:
    """A graph that follows another one is a child of it."""
    leaf = SimpleNamespace(children={})
    root = SimpleNamespace(children={0: [leaf, leaf], 1: [SimpleNamespace(children={2: [leaf]})]})
    assert _inductor._recorded(SimpleNamespace(roots={0: [leaf], 1: [root, leaf]})) == 7
    assert _inductor._recorded(None) == _inductor._recorded(SimpleNamespace(roots={})) == 0
