"""DecodeStep compiled: one compilation per bucket, the eager steps' numbers, and what a GPU would run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from serving_runs import (
    Host,
    Schedule,
    eager_step,
    everything,
    one_thread,  # noqa: F401  a fixture
    prompt,
    same,
    tiny_model,
)
from torch._inductor import config as inductor_config

import swa_inductor as swa
from swa_inductor.serving import DecodeStep, decode_step
from swa_inductor.serving.decode_step import _COUNTS, _Rows
from swa_inductor.testing import generate_code, run_on_cpu


def assert_compiled_steps_are_the_eager_ones(buckets: tuple[int, ...], count: int) -> None:
    compiled = DecodeStep(tiny_model(), buckets=buckets, eos_token_id=3)
    eager = eager_step(buckets=buckets, eos_token_id=3)
    before = everything(compiled)
    compiled.warm_up()
    assert same(everything(compiled), before), "warm-up changes nothing"
    assert compiled.compiles == len(buckets) and compiled.recordings == 0
    kept = [compiled.model.state, *compiled.sequences.tensors()]
    for rows in compiled._rows.values():
        kept += [rows.state_ids, rows.results, *rows.prepared[1:], rows.prepared.metadata.offset_len]
    addresses = [t.data_ptr() for t in kept]
    logs: list[list] = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (compiled, eager):
            log: list = []
            host = Host(step)
            host.check = lambda *_: None  # type: ignore[method-assign]  # eager steps are checked above
            played = Schedule(5, count=count).play(host, 4, on_step=lambda result, log=log: log.append(result.read()))
            assert played == count
            logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) > 20
    assert compiled.compiles == len(buckets) and [t.data_ptr() for t in kept] == addresses
    torch.testing.assert_close(*(step.model.state.view(torch.float32) for step in (compiled, eager)), equal_nan=True)
    assert same(everything(compiled)[1:], everything(eager)[1:])
    assert all(compiled.launches.values()) and compiled.launches == eager.launches


def test_compiled_steps_are_the_eager_ones() -> None:
    """D2: the C++ code of a step; same tokens at every step, warm-up changes nothing, all addresses stay."""
    with inductor_config.patch({"cpp.simdlen": 1}):  # compiles faster
        assert_compiled_steps_are_the_eager_ones((4,), 9)


def test_one_compilation_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """D2, D9: batches of any size, one graph per bucket; more buckets than Dynamo recompiles a function by itself."""

    def uncompiled(graph: torch.fx.GraphModule, inputs: list, config_patches: dict) -> Callable:
        return graph.forward

    monkeypatch.setattr(decode_step, "lookup_backend", lambda name: uncompiled)
    assert_compiled_steps_are_the_eager_ones((1, 2, 3, 4), 20)
    step = DecodeStep(tiny_model(window=4, tokens_per_step=1), buckets=range(1, 11))
    step.warm_up()
    assert step.compiles == 10


class OnGpu(torch.nn.Module):
    """The step as a module: its tensors become inputs of the graph, as on a GPU."""

    def __init__(self, step: DecodeStep) -> None:
        super().__init__()
        self.model, self.sequences = step.model, torch.nn.Module()
        for name, value in vars(step.sequences).items():
            self.sequences.register_buffer(name, value)
        for name in ("_width", "drafts", "ngram", "eos_token_id", "_sample"):
            setattr(self, name, getattr(step, name))

    def forward(self, state_ids, results, lengths, errors, *metadata) -> None:  # noqa: ANN001
        prepared = swa.PreparedDecode(swa.DecodeMetadata(*metadata), lengths, errors)
        DecodeStep._step(self, _Rows(state_ids, results, prepared))  # type: ignore[arg-type]


def test_the_sm_90_source_of_a_step() -> None:
    """C1, D2: no copy of state or history, one kernel for the metadata, in place; its numbers are the eager ones."""
    step = eager_step(max_length=40, dense_dtype=torch.float32, eos_token_id=3, vocab_size=8)
    host = Host(step)
    for slot, tokens in enumerate(([1, 2] * 9, prompt(20, vocabulary=8), prompt(3, vocabulary=8))):
        host.start(slot, tokens, 34)
    host.finish([2])
    rows = step._rows[4]
    metadata = rows.prepared.metadata
    m = (metadata.state_ids, metadata.positions, metadata.valid_start, metadata.store_rows, metadata.offset_len)
    args = (rows.state_ids, rows.results, rows.prepared.lengths, rows.prepared.errors, *m)
    module = OnGpu(step)
    code = generate_code(module, *args)
    assert sum("prepare_decode" in kernel for kernel in code.kernels) == 1
    widths = {step.sequences.tokens.shape[1], step.model.max_length, *step.model.state.shape[1:]}
    assert not any(widths & set(allocation.size) for allocation in code.allocations)
    rows.state_ids.copy_(torch.tensor([1, -1, 0, 2]))
    before = [t.clone() for t in (*step.sequences.tensors(), step.model.state)]
    run_on_cpu(code, args, module=module)
    got = [t.clone() for t in (*step.sequences.tensors(), step.model.state, *args)]
    for t, old in zip((*step.sequences.tensors(), step.model.state), before, strict=True):
        t.copy_(old)
    with torch.no_grad():
        step._step(rows)
    want = [*step.sequences.tensors(), step.model.state, *args]
    for a, b in zip(got, want, strict=True):
        if a.dtype == torch.uint8:
            a, b = a.view(torch.float32), b.view(torch.float32)
        torch.testing.assert_close(a, b, rtol=1e-5 if a.is_floating_point() else 0, atol=1e-5, equal_nan=True)
    assert rows.results[:, -_COUNTS].tolist()[1] == 0 and rows.results[0, -_COUNTS] > 0
