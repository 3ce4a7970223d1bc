"""Decode steps as CUDA graphs: recorded once, equal to eager steps on the CPU, no waiting, no memory (`-m gpu`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from serving_runs import Host, Schedule, prefill, prompt, tiny_model
from test_serving_models import decode

from swa_inductor.serving import DecodeStep, SmallModel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_step(buckets: tuple[int, ...] = (1, 2, 4), eos_token_id: int | None = None, **options) -> DecodeStep:
    return DecodeStep(tiny_model(device="cuda", **options), buckets=buckets, eos_token_id=eos_token_id)


def allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def test_replays_are_the_eager_steps() -> None:
    """D2, D3, D5, D9, D11: 200 replays of three graphs while lengths change and sequences come and go: each is the
    eager step; nothing waits, nothing is allocated, every address stays."""
    graphs = gpu_step(eos_token_id=3)
    graphs.warm_up()
    assert graphs.recordings == graphs.compiles == 3 and graphs.replays == 0
    tensors = [graphs.model.state, *graphs.sequences.tensors()]
    for rows in graphs._rows.values():
        tensors += [rows.state_ids, rows.results, *rows.prepared[1:], rows.prepared.metadata.offset_len]
    addresses = [t.data_ptr() for t in tensors]
    eager = DecodeStep(tiny_model(), buckets=(1, 2, 4), eos_token_id=3, compile=False)
    launch = graphs.launch

    def watched(slots: list[int]):  # noqa: ANN202
        before = allocations()
        with no_waiting():
            result = launch(slots)
        assert allocations() == before
        return result

    graphs.launch = watched  # type: ignore[method-assign]
    logs: list[list] = []
    for step in (graphs, eager):
        log: list = []
        host = Host(step)
        Schedule(5, count=60).play(host, 4, on_step=lambda result, log=log: log.append(result.read()))
        assert 0 < host.accepted < host.drafts
        logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) >= 200
    assert graphs.replays == len(logs[0]) and graphs.recordings == graphs.compiles == 3
    assert [t.data_ptr() for t in tensors] == addresses
    for mine, theirs in zip(graphs.sequences.tensors(), eager.sequences.tensors(), strict=True):
        assert torch.equal(mine[:-1].cpu(), theirs[:-1])
    rings = [step.model.state.cpu().view(torch.float32) for step in (graphs, eager)]
    torch.testing.assert_close(*rings, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert graphs.error_count() == 0


def test_tokens_are_those_of_the_model_alone() -> None:
    """D8: results are read late and out of step; rings start as NaN codes, and no row but those indexed matters."""
    host = Host(gpu_step(layers=2, tokens_per_step=6))
    assert Schedule(7).play(host, 4) == 9


def test_any_batch_size_finds_a_recorded_graph() -> None:
    """D9, D12: sizes 1 to 8 at random, graphs of 8, 4, 2, 1; memory is flat after warm-up."""
    step = gpu_step(buckets=(1, 2, 4, 8), num_slots=8)
    host = Host(step)
    for slot in range(8):
        host.start(slot, prompt(20, slot), 96)
    step.warm_up()
    reserved = torch.cuda.memory_reserved()
    rng = random.Random(0)
    for _ in range(60):
        host.run(rng.sample(range(8), rng.randint(1, 8)))
    assert step.recordings == 4 and torch.cuda.memory_reserved() == reserved
    assert sum(step.launches.values()) == step.replays == 60 and all(step.launches.values())
    for slot in range(8):
        host.check(slot)


def test_padded_rows_write_no_byte() -> None:
    """D5, F9: a graph of 8 with 8 sequences, then with 3 beside padding and finished ones: the others stay."""
    step = gpu_step(buckets=(8,), num_slots=8)
    host = Host(step)
    for slot in range(8):
        host.start(slot, prompt(20, slot), 24 if slot > 5 else 96)
    host.run(list(range(8)))
    host.finish([6, 7])
    before = step.model.state.clone()
    host.run([6, 0, 7, 1, 2])
    changed = (step.model.state != before).any(1)
    assert changed.tolist() == [True] * 3 + [False] * 5


def test_reads_wait_for_their_own_step_alone() -> None:
    """F10: a stream that is far behind; more steps than host buffers; results are those of steps read at once."""
    step, at_once = gpu_step(buckets=(2,)), Host(gpu_step(buckets=(2,)))
    host = Host(step)
    for h in (host, at_once):
        h.start(0, prompt(20), 96)
        h.start(1, prompt(9, 1), 60)
        h.step.warm_up()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    with no_waiting():
        results = [step.launch([0, 1]) for _ in range(8)]
    assert not results[0].ready()
    first = results[0].read()
    torch.cuda._sleep(2_000_000_000)
    results.append(step.launch([0, 1]))
    for result in results[:-1]:
        result.read()
    assert not results[-1].ready()
    assert results[0].read() == first
    for i in range(20):
        torch.cuda._sleep(5_000_000)
        results.append(step.launch([0, -1] if i % 2 else [1, 0]))
    for result in results:
        assert host.take(result) == at_once.take(at_once.step.launch(result.slots))
    for slot in (0, 1):
        host.check(slot)


def test_admission_does_not_wait() -> None:
    """F10: 40 admissions on a stream that is behind, their pinned memory given back long before it was read."""
    step = gpu_step(buckets=(2,), num_slots=40)
    step.warm_up()
    prompts = [prompt(30, seed) for seed in range(40)]
    first = torch.stack([prefill(step.model, [(slot, tokens, 30)])[0] for slot, tokens in enumerate(prompts)])
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    with no_waiting():
        chosen = step.sample_first(first)
        results = [step.admit([i], [prompts[i]], chosen[i : i + 1], limits=[32 + i % 2]) for i in range(40)]
    assert not results[0].ready()
    want = [int(step.model.reference_logits(tokens)[-1].argmax()) for tokens in prompts]
    assert [result.read().tokens for result in results] == [[[token]] for token in want]
    s = step.sequences
    assert s.tokens[:40, :30].tolist() == prompts and s.tokens[:40, 30].tolist() == want
    assert s.limits[:40].tolist() == [32, 33] * 20 and s.limits[40] == 0


def plain(fn: Callable) -> Callable:
    return fn


def graphed(fn: Callable) -> Callable:
    """Compiled and captured at the first call; the next ones copy into the inputs of the first and replay."""
    compiled = torch.compile(fn, fullgraph=True, dynamic=False)
    state = fn.__self__.state  # type: ignore[attr-defined]
    graphs: dict[int, tuple] = {}

    def call(tokens: torch.Tensor, metadata, *rest: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        inputs = [tokens, *(t for t in vars(metadata).values() if t is not None), *rest]
        if tokens.shape[0] not in graphs:
            stream, saved = torch.cuda.Stream(), state.clone()  # a prefill may not run twice
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                compiled(tokens, metadata, *rest)
            torch.cuda.current_stream().wait_stream(stream)
            state.copy_(saved)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = compiled(tokens, metadata, *rest)
            graphs[tokens.shape[0]] = graph, inputs, out
        graph, mine, out = graphs[tokens.shape[0]]
        for a, b in zip(mine, inputs, strict=True):
            a.copy_(b)
        graph.replay()
        return out.clone()

    return call


@pytest.mark.parametrize("wrap", [plain, graphed])
@pytest.mark.parametrize("path", ["decode", "verify", "extend", "prefill"])
def test_every_path_uses_the_rings(path: str, wrap: Callable) -> None:
    """D13: decode, verification of drafts, extension by a few tokens, prefill: right, and only in rows of its slot."""
    model = tiny_model(tokens_per_step=1 if path == "decode" else 4, device="cuda")
    prefill_alone = model.prefill
    new = {"decode": 1, "verify": 4, "extend": 3, "prefill": 30}[path]
    model.decode, model.prefill = wrap(model.decode), wrap(model.prefill)  # type: ignore[method-assign]
    for slot in (2, 0):  # captured with one slot, replayed with another
        tokens = prompt(30 + new, slot)
        captured, model.prefill = model.prefill, prefill_alone  # type: ignore[method-assign]
        prefill(model, [(slot, tokens[:30], 30)])
        model.prefill = captured  # type: ignore[method-assign]
        before = model.state.clone()
        logits = (decode if path in ("decode", "verify") else prefill)(model, [(slot, tokens, new)])
        torch.testing.assert_close(logits[-1], model.reference_logits(tokens)[-1], rtol=0, atol=1e-4)
        rows = (model.state != before).view(5, model.spec.rows, -1).any(-1)
        written = {p % model.spec.rows for p in range(30, 30 + new)}
        assert rows.any(1).nonzero().flatten().tolist() == [slot]
        assert set(rows[slot].nonzero().flatten().tolist()) == written


def test_half_precision_steps() -> None:
    """The formats that serve: bf16 layers over mxfp8 rings; finite, refused by nobody, limits exact."""
    model = SmallModel(
        num_slots=8,
        max_length=400,
        tokens_per_step=6,
        hidden=128,
        heads=8,
        kv_heads=1,
        head_dim=64,
        kv_format="mxfp8",
        dense_dtype=torch.bfloat16,
        device="cuda",
    )
    model.state.fill_(0xFF)
    step = DecodeStep(model, buckets=(8,))
    host = Host(step)
    for slot in range(8):
        host.start(slot, prompt(150 + slot, slot, 256), 300 + slot, chunk=64)
    host.finish(list(range(8)))
    assert [len(host.generated[slot]) for slot in range(8)] == [150] * 8
    for slot in range(8):
        logits = model.reference_logits(host.prompts[slot] + host.generated[slot]).float()[149 + slot : -1]
        assert logits.isfinite().all()
        chosen = logits.gather(1, torch.tensor(host.generated[slot], device="cuda")[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) < 0.5 * logits.std(1)).float().mean() > 0.9  # but for near ties
    assert step.error_count() == 0


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_graphs_of_transformers_models(name: str) -> None:
    """Drafts on; tokens are those of stock eager attention in fp32."""
    ring_models = pytest.importorskip("ring_models")
    from swa_inductor.integrations.transformers import TransformersSlotModel

    stock = ring_models.make_model(name).cuda()
    model = TransformersSlotModel(stock, num_slots=4, max_length=90, tokens_per_step=3)
    model.cache.rings.fill_(0xFF)
    step = DecodeStep(model, buckets=(1, 4), ngram=2)
    host = Host(step)
    step.warm_up()
    for slot in range(3):
        host.start(slot, prompt(17 + 10 * slot, slot, ring_models.VOCAB), 90, chunk=25)
    with no_waiting():
        results = [step.launch([0, 1, 2]) for _ in range(4)]
    for result in results:
        host.take(result)
    host.finish([0, 1, 2])
    assert step.recordings == 2 and step.error_count() == 0
    for slot in range(3):
        tokens = host.prompts[slot] + host.generated[slot]
        logits = ring_models.stock_logits(stock, torch.tensor([tokens], device="cuda"))[0]
        assert host.generated[slot] == logits.argmax(-1)[len(host.prompts[slot]) - 1 : -1].tolist()
