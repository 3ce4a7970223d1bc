"""Serving on a GPU: captured steps under a delayed stream, hundreds of requests, each as alone (`pytest -m gpu`)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from serving_runs import VOCAB, tiny_model
from test_serve_sim import AZURE, invoke

from swa_inductor.serving import DecodeStep, StepResult, serve_sim
from swa_inductor.serving.engine import Engine, Request

pytestmark = pytest.mark.gpu

DELAY = 1_000_000
"""Clock cycles that the device sleeps before a step: the host is always ahead of it."""


class DelayedStep(DecodeStep):
    """Steps that start late."""

    def launch(self, slots: list[int]) -> StepResult:
        torch.cuda._sleep(DELAY)
        return super().launch(slots)


@pytest.mark.parametrize("options", ["", "--sync", "--drafts 3", "--time-slice 100"])
def test_five_hundred_requests_as_alone(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D9, F1: one recording per bucket, whatever is alive; both loops give every request the tokens it gets alone."""
    monkeypatch.setattr(serve_sim, "DecodeStep", DelayedStep)
    report = tmp_path / "figures.json"
    trace = ["--trace", AZURE] if AZURE.exists() else []
    code, output = invoke(
        "--device", "cuda", *trace, "--requests", 500, "--chunk-tokens", 1024, "--verify", "all", "--json", report,
        *options.split(),
    )  # fmt: skip
    assert code == 0, output
    figures = json.loads(report.read_text())
    assert figures["verified"] == 500 and figures["wrong"] == [] and figures["device_errors"] == 0
    assert figures["recordings"] == figures["compiled_buckets"] == len(figures["launches"]) == 7
    assert figures["replays"] == figures["steps"] == sum(figures["launches"].values())
    assert (figures["preemptions"] > 0) == ("--time-slice" in options)
    assert figures["ring_bytes"] < figures["full_kv_bytes"]


@pytest.mark.parametrize("drafts", [0, 3])
def test_nothing_waits_but_for_results(drafts: int) -> None:
    """D11: after warm-up no call of the loop synchronises; recordings and memory stay as they are (D9)."""
    source = random.Random(0)
    lengths = [(source.randint(1, 60), source.randint(1, 30)) for _ in range(60)]
    requests = [Request(i, source.choices(range(VOCAB), k=n), new) for i, (n, new) in enumerate(lengths)]
    model = tiny_model(num_slots=6, tokens_per_step=drafts + 1, device="cuda")
    made = {}
    for overlapped in (True, False):
        step = DelayedStep(model, buckets=[1, 2, 4, 8])
        engine = Engine(model, step, chunk_tokens=64, overlapped=overlapped, time_slice=9)
        engine.warm_up()
        engine.run(requests[:20])
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.run(requests[20:])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= held
        assert step.recordings == step.compiles == 4 and step.error_count() == 0
        made[overlapped] = engine.finished
    assert made[True] == made[False]
    assert [len(made[True][r.id]) for r in requests] == [r.max_new_tokens for r in requests]
    assert not [r.id for r in requests if serve_sim.first_difference(serve_sim._alone(model), r, made[True][r.id])]
