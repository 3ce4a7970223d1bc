"""prepare_decode on a GPU: bit-equal to the host twin, one launch, and inside captured graphs (`pytest -m gpu`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from cases import BY_NAME, attention_op, flat, prepare_op, store_op, unflat, vectors
from numerics import assert_same
from test_gpu import to_gpu
from test_prepare_decode import BAD, FORMS, SLOTS, V4, Batch, random_batch, step, tensors, twin
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import swa_inductor as swa

pytestmark = pytest.mark.gpu


def with_bad_ones(batch: Batch, seed: int) -> Batch:
    """The batch with some of its sequences replaced by bad ones."""
    rows, rng = list(zip(*batch, strict=True)), random.Random(seed)
    rows = [rng.choice(list(BAD.values())) if rng.random() < 0.2 else row for row in rows]
    return tuple(zip(*rows, strict=True)) if rows else batch  # type: ignore[return-value]


def make(seed: int, count: int) -> Batch:
    rng = random.Random(seed)
    return with_bad_ones(random_batch(6, [rng.choice([rng.randrange(400), 10**9]) for _ in range(count)], seed), seed)


def assert_is_twin(got: Sequence[torch.Tensor], batch: Batch, width: int | None, errors: int = 0) -> int:
    """Bit-equal to the host builder; `errors` stood in the counter before. Returns what stands in it now."""
    want = flat(twin(V4, batch, width))
    for value, expected in zip(got[:-1], want[:-1], strict=True):
        assert_same(value.cpu(), expected)
    total = errors + int(want[-1])
    assert got[-1].tolist() == [total]
    return total


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [None, 128, 300])
def test_equals_the_host_twin(form: str, width: int | None) -> None:
    """F12, F14: no sequence, one, a number that fills no block, more than a block of the counter; some are bad."""
    torch._dynamo.reset()
    compiled = torch.compile(prepare_op(V4, SLOTS, width), fullgraph=True)
    for seed, count in enumerate((7, 129, 600, 1, 0)):
        batch = make(seed, count)
        out = flat(swa.PreparedDecode.allocate(V4, count, width=width, device="cuda")) if form == "out" else ()
        got = compiled(*to_gpu(tensors(batch)), *out)
        errors = assert_is_twin(out or got, batch, width)
        assert errors or count < 100


@pytest.mark.parametrize("form", FORMS)
def test_one_launch(form: str) -> None:
    """D11: what was compiled for this device launches one kernel and calls nothing else."""
    args = to_gpu(tensors(make(0, 9)))
    out = flat(swa.PreparedDecode.allocate(V4, 9, width=128, device="cuda")) if form == "out" else ()
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(prepare_op(V4, SLOTS, 128), fullgraph=True), *args, *out)
    call = code[code.index("def call(") : code.index("def benchmark_compiled_module")]
    FileCheck().check_count(".run(", 1, exactly=True).check_not("extern_kernels").check_not("torch.ops").run(call)
    FileCheck().check("triton_tem_fused_prepare_decode").run(call)


def captured(fn: Callable, args: Sequence[torch.Tensor | None]) -> torch.cuda.CUDAGraph:
    """`fn(*args)` as a graph; a synchronisation while it is called is an error."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            fn(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return graph


@pytest.mark.parametrize("width", [None, 128])
def test_captured(width: int | None) -> None:
    """D2, D3, D5, D11, D12: graphs of 8, 4, 2 and 1 sequences, replayed with other inputs each time: rows from this
    replay alone, at the addresses of `allocate`, bad sequences of all replays counted."""
    graphs = {}
    torch._dynamo.reset()
    for count in (8, 4, 2, 1):
        fn = torch.compile(prepare_op(V4, SLOTS, width), fullgraph=True, dynamic=False)
        inputs = to_gpu(tensors(step([0] * count, [0] * count, [-1] * count)))
        out = flat(swa.PreparedDecode.allocate(V4, count, width=width, device="cuda"))
        graphs[count] = captured(fn, [*inputs, *out]), fn, inputs, out, [t.data_ptr() for t in out]
        assert out[-1].item() == 0
    errors = dict.fromkeys(graphs, 0)
    for seed in range(40):
        count = (8, 4, 2, 1)[seed % 4]
        graph, _, inputs, out, pointers = graphs[count]
        batch = make(seed, count)
        for held, value in zip(inputs, tensors(batch), strict=True):
            held.copy_(value)
        graph.replay()
        errors[count] = assert_is_twin(out, batch, width, errors[count])
        graph.replay()  # nothing but the counter depends on how often a step was prepared (F6)
        errors[count] = assert_is_twin(out, batch, width, errors[count])
        assert [t.data_ptr() for t in out] == pointers
    assert all(errors.values())


def test_a_captured_step() -> None:
    """D5, D7, F9: metadata, store and attention as one graph: rows that are padded in a replay write no byte and
    attend to nothing, whatever the replay before left."""
    case = BY_NAME["v4"]
    k, _, q = (None if t is None else t.cuda() for t in vectors(case, 48))
    cache = torch.full(V4.cache_shape(SLOTS), 0x11, dtype=torch.uint8, device="cuda")
    inputs = to_gpu(tensors(step([0] * 8, [0] * 8, [-1] * 8)))
    out = flat(swa.PreparedDecode.allocate(V4, 8, device="cuda"))
    result = torch.full_like(q, torch.nan)
    prepare, attend, put = prepare_op(V4, SLOTS), attention_op(case, False), store_op(case)

    def fn(k, q, cache, result, *args):  # noqa: ANN001, ANN202
        prepare(*args)
        m = unflat(*args[5:]).metadata
        put(k, None, cache, m.state_ids, m.positions)
        result.copy_(attend(q, cache, m.state_ids, m.positions, m.valid_start, None))

    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, dynamic=False)
    args = [k, q, cache, result, *inputs, *out]
    graph = captured(compiled, args)
    assert (cache == 0x11).all() and not result.any()
    expected = cache.cpu()
    for ids in (range(5), (0, -1, 2, -1, -1), (SLOTS, 3, -1, 1, -2)):
        batch = step([100, 128, 400, 133, 7] + [0] * 3, [0, 6, 1, 3, 6] + [0] * 3, [*ids, -1, -1, -1], drafts=3)
        for held, value in zip(inputs, tensors(batch), strict=True):
            held.copy_(value)
        graph.replay()
        m = twin(V4, batch).metadata
        put(k.cpu(), None, expected, m.state_ids, m.positions)
        assert_same(cache.cpu(), expected)
        want = attend(q.cpu(), expected, m.state_ids, m.positions, m.valid_start, None)
        torch.testing.assert_close(result.cpu(), want, rtol=2e-2, atol=2e-2)
        assert not result[(m.state_ids < 0).cuda()].any()
    assert out[-1].item() == 2
