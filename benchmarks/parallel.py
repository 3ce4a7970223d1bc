"""A decode step of the DeepSeek-V4 layer on one GPU and split over two, as one CUDA graph on each; in one run.

6 tokens per sequence. "all-reduce" is that of the layer's output alone. NCCL; with --check gloo on the CPU, untimed.

    python -m benchmarks.parallel [--shapes NAME ...] [--batches N ...] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import copy
import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import init_device_mesh

from benchmarks import _measure, layer
from swa_inductor.models.deepseek_v4_parallel import parallelize

RANKS = 2
LIMIT = 1e-2
"""Of the error relative to one rank: bf16 sums in another order."""


def measure(name: str, batch: int, small: bool) -> dict[str, Any]:
    """Run by every rank on its own device."""
    config = replace(layer.SHAPES[name], **layer.SMALL) if small else layer.SHAPES[name]
    torch.manual_seed(0)
    sets = 2
    whole = layer.new_layer(config, batch * sets)
    split = copy.deepcopy(whole)
    mesh = init_device_mesh(_measure.DEVICE, (RANKS,))
    parallelize(split, mesh)
    inputs = layer.step_inputs(config, batch, sets)
    times = {}
    for key, model in (("1 rank, us", whole), (f"{RANKS} ranks, us", split)):
        step = _measure.compiled(model)
        out = step(*inputs[0])
        if model is whole:
            want = out
        _measure.require_close(f"{name}, {batch} sequences", out, want, LIMIT)
        dist.barrier()
        times[key] = _measure.microseconds(step, inputs)
    results = [(torch.randn_like(want),) for _ in range(sets)]
    times["all-reduce, us"] = _measure.microseconds(all_reduce, results)
    return {"layer": name, "sequences": batch, "tokens": batch * config.tokens_per_step, **times}


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _rank(rank: int, port: int, device: str, timed: bool, jobs: list[tuple], results: Any) -> None:
    _measure.DEVICE, _measure.TIMED = device, timed
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        with torch.no_grad():
            rows = [measure(*job) for job in jobs]
        if rank == 0:
            results.put(rows)
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    if _measure.DEVICE == "cuda" and torch.cuda.device_count() < RANKS:
        raise SystemExit(f"needs {RANKS} CUDA devices")
    batches = args.batches or ((2,) if args.check else (8, 64, 256))
    jobs = [(name, batch, args.check) for name in args.shapes for batch in batches]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: Any = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (port, _measure.DEVICE, _measure.TIMED, jobs, results), RANKS)
    return list(results.get())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=layer.SHAPES, default=["V4-Flash", "V4-Pro"])
    parser.add_argument("--batches", nargs="+", type=int)


if __name__ == "__main__":
    _measure.report("parallel", run, options)
