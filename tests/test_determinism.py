"""The same inputs give the same bytes and the same outputs, however often: no result depends on who comes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import BY_NAME, Case, decode_inputs
from numerics import assert_same
from torch import Tensor

import swa_inductor as swa
from swa_inductor.testing import generate_code, run_on_cpu

NAMES = ("q", "k", "v", "cache", "state_ids", "positions", "valid_start", "sinks")


def layer(case: Case) -> Callable:
    """A step through the ops: stores, a workspace, attention over ring and new tokens, metadata of the next step."""
    spec, d = case.spec, case.spec.tokens_per_step

    def fn(q, k, v, cache, ids, at, start, sinks) -> tuple:  # noqa: ANN001
        first = (at.view(-1, d)[:, :1]).expand(-1, d).reshape(-1)
        options = {"spec": spec, "valid_start": start, "sinks": sinks, "return_lse": True}
        new = swa.attention_prefill(q, k, v, cache, ids, at, first, **options)
        back = swa.store_cast_back(k * 2, v, cache, ids, at, spec=spec)
        rows = swa.gather(cache, ids[::d], at[::d], spec=spec, dtype=q.dtype)
        ring = swa.attention(q, cache, ids, at, tokens_per_step=d, **options)
        swa.store(k, v, cache, ids, at, spec=spec)
        m, lengths, errors = swa.prepare_decode(at[::d], ids[::d] * 0 + 1, ids[::d], spec=spec, num_slots=len(cache))
        return *new, *back, *rows, *ring, m.positions, m.offset_len, lengths, errors

    return fn


def same_runs(fn: Callable, args: list, runs: int) -> int:
    """`runs` runs from the same ring: each gives the same outputs and leaves the same bytes; -> their number."""
    cache = args[NAMES.index("cache")]
    before, first = cache.clone(), None
    for _ in range(runs):
        cache.copy_(before)
        got = [*(t for t in fn(*args) if t is not None), cache]
        if first is None:
            first = [t.clone() for t in got]
            assert not torch.equal(cache, before)
        for value, was in zip(got, first, strict=True):
            assert_same(value, was)
    return runs


def inputs(case: Case, device: str = "cpu") -> list[Tensor | None]:
    x = decode_inputs(case)
    return [None if x[n] is None else x[n].to(device) for n in NAMES]


def test_compiled_on_the_cpu() -> None:
    """All threads of the machine share the work."""
    torch._dynamo.reset()
    case = BY_NAME["odd-group"]
    assert same_runs(torch.compile(layer(case), fullgraph=True, dynamic=False), inputs(case), 20) == 20


def test_generated_source() -> None:
    """What the interpreter runs holds no value that another run left behind."""
    case = BY_NAME["mha-fp16"]
    args = inputs(case)
    code = generate_code(layer(case), *args)
    assert same_runs(lambda *args: run_on_cpu(code, args), args, 3) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("name", ["v4", "gpt-oss", "gemma3", "odd-group"])
def test_on_a_gpu(name: str, autotune: bool) -> None:
    """Few sequences, so that programs share the keys of a query; tiles as they are chosen, or by autotuning."""
    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs" if autotune else None
    step = torch.compile(layer(BY_NAME[name]), fullgraph=True, mode=mode)
    assert same_runs(step, inputs(BY_NAME[name], "cuda"), 100) == 100
