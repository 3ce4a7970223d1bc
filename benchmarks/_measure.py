"""How benchmarks measure: CUDA-graph replays over rotating inputs, and what is written down beside the figures."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import swa_inductor

ROTATE_BYTES = 150 << 20
"""Inputs and outputs of one replay together: three times the L2 cache of an H200, so that they come from memory."""

DEVICE = "cuda"
"""Where benchmarks run; "cpu" under --check, where nothing is compiled and nothing is timed."""

TIMED = True
"""False in the processes of `warm`: every function is called once."""

WARM_SECONDS = 120
"""After so long `warm` gives up: what is not compiled by then is compiled where it is measured."""

Inputs = tuple[Tensor | None, ...]


def copies(bytes_per_call: int) -> int:
    """Input sets to rotate over."""
    return max(2, math.ceil(ROTATE_BYTES / bytes_per_call))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` compiled for its next sizes alone, forgetting what was compiled before; elsewhere than on a GPU as it is."""
    if DEVICE != "cuda":
        return fn
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=False)


def microseconds(fn: Callable[..., Any], inputs: Sequence[Inputs], target_ms: float = 150.0) -> float:
    """Median time of one call: a CUDA graph calls `fn` on each set of inputs, each call with outputs of its own.

    Under --check and in `warm` it is called once, and the time is NaN.
    """
    if not TIMED:
        fn(*inputs[0])
        return math.nan
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn(*inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for args in inputs:
            outputs.append(fn(*args))
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = min(max(int(target_ms / max(start.elapsed_time(end), 1e-3)), 11), 200)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(replays)]
    for begin, finish in events:
        begin.record()
        graph.replay()
        finish.record()
    torch.cuda.synchronize()
    median = statistics.median(begin.elapsed_time(finish) for begin, finish in events) * 1e3 / len(inputs)
    del graph, outputs
    return median


def copy_us(moved: int, how: str = "pointwise") -> float:
    """Median time to read and write `moved` bytes in all, by a compiled pointwise kernel or by 'copy_'."""
    inputs = [(torch.ones(moved // 8, dtype=torch.int32, device=DEVICE),) for _ in range(copies(moved))]
    return microseconds(compiled(_add_one) if how == "pointwise" else torch.clone, inputs)


def _add_one(x: Tensor) -> Tensor:
    return x + 1


def require_close(what: str, value: Tensor, exact: Tensor, limit: float) -> None:
    """||value - exact|| <= limit * ||exact||, or the benchmark stops."""
    error = float((value.double() - exact.double()).norm() / exact.double().norm())
    if not error <= limit:
        raise SystemExit(f"{what}: error {error:.2e}, allowed {limit:.0e}")


def bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def random_cache(spec: swa_inductor.RingSpec, slots: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A cache on the device in which every row holds the record of a random vector."""
    cache = torch.empty(spec.cache_shape(slots), dtype=torch.uint8, device=DEVICE)
    at = torch.arange(spec.rows, device=DEVICE).repeat(min(slots, 64))
    for first in range(0, slots, 64):
        count = min(64, slots - first)
        ids = torch.arange(first, first + count, device=DEVICE, dtype=torch.int32).repeat_interleave(spec.rows)
        k = torch.randn(len(ids), spec.num_kv_heads, spec.head_dim, device=DEVICE, dtype=dtype)
        v = None
        if spec.v_head_dim is not None:
            v = torch.randn(*k.shape[:2], spec.v_head_dim, device=DEVICE, dtype=dtype)
        swa_inductor.store(k, v, cache, ids, at[: len(ids)], spec=spec)
    return cache


def sequences(starts: Tensor, lens: int) -> tuple[Tensor, Tensor]:
    """Positions int64 [B * lens] of `lens` tokens per sequence from `starts` [B], and the sequence of each token."""
    positions = (starts[:, None] + torch.arange(lens, device=starts.device)).flatten()
    return positions, torch.arange(len(starts), device=starts.device).repeat_interleave(lens)


def report(
    name: str,
    run: Callable[..., list[dict[str, Any]]],
    options: Callable[[argparse.ArgumentParser], object] | None = None,
    unit: str = "microseconds unless named, median of CUDA-graph replays",
) -> None:
    """Command line of a benchmark: run it, print its rows as a table, write them with --json.

    `options` adds arguments of its own, and --check; `run` is called with what was given, without `options` with
    nothing.
    """
    global DEVICE, TIMED
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    if options is not None:
        options(parser)
        parser.add_argument("--check", action="store_true", help="small, on the CPU, uncompiled: results, not times")
        parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    TIMED = not (getattr(args, "check", False) or getattr(args, "warm", False))
    if getattr(args, "check", False):
        DEVICE = "cpu"
    elif not torch.cuda.is_available() and not getattr(args, "figures", None):
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    rows = run() if options is None else run(args)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    table = [heads, *([_cell(row.get(key)) for key in heads] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if args.json and not getattr(args, "figures", None) and TIMED:
        figures = {"benchmark": name, **_circumstances(), "unit": unit, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def warm(name: str, arguments: Sequence[Sequence[str]]) -> None:
    """Run a benchmark untimed with each of these arguments, all at once: the caches on disk then hold what it compiles.

    Each process compiles one thing after the other: about as many of them as there are cores are right.
    """
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--warm"]
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = [subprocess.Popen([*command, *some], env=environment, **silent) for some in arguments]
    end = time.monotonic() + WARM_SECONDS
    for job in jobs:
        try:
            job.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            job.kill()


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _circumstances() -> dict[str, Any]:
    """What a figure means nothing without."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "swa_inductor": swa_inductor.__version__,
        "commit": commit.stdout.strip() or None,
    }
