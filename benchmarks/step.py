"""A whole decode step, metadata, layers, sampling and verification of drafts: a model of the size of Gemma 3 270M.

Random weights in bf16. Each bucket is one CUDA graph; steps are launched back to back, results read one step behind.
Wall time per step, and the time that the host spends in a launch.

    python -m benchmarks.step [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks import _measure
from swa_inductor.integrations.transformers import TransformersSlotModel
from swa_inductor.serving import DecodeStep

WIDTHS, BUCKETS, STEPS, MAX_LENGTH = (1, 6), (8, 64), 200, 4096


def gemma() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    )
    with torch.device("cuda"):
        return Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def fill(step: DecodeStep) -> None:
    """Sequences in every slot, 600 to 1,500 tokens long. The rings hold zeros: what is in them takes no time."""
    s, slots = step.sequences, step.model.num_slots
    s.lengths[:slots].random_(600, 1500)
    s.accepted[:slots] = 1
    s.limits[:slots] = MAX_LENGTH
    s.tokens[:slots].random_(0, 50)  # few different ones, so that drafts are found


def measure(step: DecodeStep, bucket: int) -> dict[str, Any]:
    fill(step)
    slots, host, last = list(range(bucket)), [], None
    for i in range(STEPS + 20):
        if i == 20:
            torch.cuda.synchronize()
            start = time.perf_counter()
        before = time.perf_counter()
        result = step.launch(slots)
        host.append(time.perf_counter() - before)
        if last is not None:
            last.read()
        last = result
    torch.cuda.synchronize()
    return {
        "sequences": bucket,
        "tokens per sequence": step.model.spec.tokens_per_step,
        "ms per step": (time.perf_counter() - start) / STEPS * 1e3,
        "host us per launch": statistics.median(host[20:]) * 1e6,
        "recordings": step.recordings,
        "errors": step.error_count(),
    }


def run() -> list[dict[str, Any]]:
    model, rows = gemma(), []
    for width in WIDTHS:
        slots = TransformersSlotModel(
            model, num_slots=max(BUCKETS), max_length=MAX_LENGTH, tokens_per_step=width, kv_format="bf16"
        )
        step = DecodeStep(slots, buckets=BUCKETS)
        step.warm_up()
        rows += [measure(step, bucket) for bucket in BUCKETS]
    return rows


if __name__ == "__main__":
    _measure.report("step", run)
