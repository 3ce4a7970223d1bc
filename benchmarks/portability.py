"""Registers, spills and shared memory of every kernel on every architecture, from ptxas; no GPU takes part.

    python -m benchmarks.portability --json benchmarks/results/portability.json

Exits with 1 where a kernel does not compile, takes more shared memory than a block may have, or spills more than LIMITS
allow. `--shapes` and `--archs` choose; tests/test_ptxas.py compiles a few of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import swa_inductor as swa
from swa_inductor.testing import CARDS, KernelUsage, resource_usage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its arguments, and further options of resource_usage."""


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for. norm: RMSNorm of q and K, "weight": weighted. rope_dim: dims that RoPE turns.

    every: all ops, not only attention of decode steps and of prefill, which take the most registers.
    """

    spec: swa.RingSpec
    heads: int
    dtype: torch.dtype = BF16
    norm: str | None = None
    rope_dim: int = 0
    halves: bool = False
    inverse: bool = False
    sinks: bool = True
    softcap: float | None = None
    every: bool = False
    x_width: int = 1280


def _ring(window: int, step: int, dim: int, **more: Any) -> swa.RingSpec:
    return swa.RingSpec(window, step, dim, **more)


SHAPES = {
    "V4": Shape(_ring(128, 6, 512, shared_kv=True), 64, norm="plain", rope_dim=64, inverse=True, every=True),
    "512 K = V": Shape(_ring(128, 6, 512, shared_kv=True), 8),
    "512 K and V, bf16": Shape(_ring(512, 1, 512, kv_format="bf16"), 8, norm="weight", rope_dim=512, halves=True),
    "Gemma 3": Shape(
        _ring(1024, 1, 256, num_kv_heads=4, kv_format="bf16"), 8, norm="weight", rope_dim=256, halves=True, sinks=False
    ),
    "256, 96 rows": Shape(_ring(64, 6, 256), 16, rope_dim=256, halves=True, softcap=50.0, every=True),
    "192 and 128": Shape(
        _ring(128, 4, 192, v_head_dim=128, num_kv_heads=8), 64, rope_dim=64, halves=True, inverse=True
    ),
    "128, bf16": Shape(_ring(4096, 1, 128, num_kv_heads=8, kv_format="bf16"), 32, rope_dim=128, halves=True),
    "128 K = V": Shape(_ring(70, 5, 128, shared_kv=True), 24, norm="weight", rope_dim=32, halves=True, inverse=True),
    "96, fp16": Shape(_ring(40, 5, 96, num_kv_heads=2), 6, FP16, norm="weight", rope_dim=96, x_width=40, every=True),
    "gpt-oss": Shape(
        _ring(128, 6, 64, num_kv_heads=8, kv_format="bf16"), 64, rope_dim=64, halves=True, x_width=2880, every=True
    ),
    "64": Shape(_ring(128, 1, 64), 8, norm="weight", rope_dim=64),
    "512 K = V, fp32": Shape(_ring(64, 6, 512, shared_kv=True), 64, FP32, norm="plain", rope_dim=64, inverse=True),
    "128, fp32": Shape(
        _ring(70, 2, 128, kv_format="fp32"), 3, FP32, norm="weight", rope_dim=128, halves=True, every=True
    ),
}
ARCHS = {f"sm_{major}{minor}": (major, minor) for major, minor in CARDS}
SLOTS, SEQUENCES = 9, 2

MOST_REGISTERS = ("attention", "attention, any T", "attention_prefill")

LIMITS = {"gather": 2, "attention": 16, "attention_workspace": 16, "attention_index": 16, "attention_prefill": 64}
"""Words of local memory that a thread may spill, by op; none in the others."""


def calls(shape: Shape) -> dict[str, Call]:
    """Calls of the ops with a template; `attention, any T` compiles for any number of tokens."""
    spec, tokens = shape.spec, SEQUENCES * shape.spec.tokens_per_step

    def vectors(heads: int, dim: int | None) -> Tensor | None:
        return None if dim is None else torch.empty(tokens, heads, dim, dtype=shape.dtype)

    q, k, v = (
        vectors(shape.heads, spec.head_dim),
        *(vectors(spec.num_kv_heads, d) for d in (spec.head_dim, spec.v_head_dim)),
    )
    cache = torch.empty(spec.cache_shape(SLOTS), dtype=torch.uint8)
    ids, at = torch.empty(tokens, dtype=torch.int32), torch.empty(tokens, dtype=torch.int64)
    sinks = torch.empty(shape.heads) if shape.sinks else None
    weight = torch.empty(spec.head_dim) if shape.norm == "weight" else None
    table = torch.empty(99, shape.rope_dim) if shape.rope_dim else None
    eps = 1e-6 if shape.norm else None
    plain = {"sinks": sinks, "softcap": shape.softcap, "return_lse": True}
    turned = {"rope": table, "rope_interleaved": not shape.halves}
    around = {"q_norm_eps": eps, "q_norm_weight": weight, **turned, "inverse_rope": shape.inverse}
    in_front = {"norm_eps": eps, "norm_weight": weight, **turned}
    ring, new = {"spec": spec}, (k, v, cache, ids, at)

    def call(op: Callable[..., Any], *args: Any, dynamic: Sequence[int] = (), **options: Any) -> Call:
        return op, args, {"kwargs": options, "dynamic_inputs": dynamic}

    decode = {**ring, **plain, **around, "tokens_per_step": spec.tokens_per_step}
    of_records = {"kv_format": spec.kv_format, "v_head_dim": spec.v_head_dim}
    made = {
        "store": call(swa.store, *new, **ring, **in_front),
        "store_cast_back": call(swa.store_cast_back, *new, **ring, **in_front),
        "norm_store": call(
            swa.norm_store, torch.empty(tokens, shape.x_width, dtype=shape.dtype), *new, **ring, **in_front, x_eps=1e-6
        ),
        "attention": call(swa.attention, q, cache, ids, at, **decode),
        "attention, any T": call(swa.attention, q, cache, ids, at, dynamic=(0, 2, 3), **decode),
        "attention_prefill": call(swa.attention_prefill, q, *new, at, **ring, **plain, **around),
        "attention_workspace": call(
            swa.attention_workspace, q, k, v, torch.empty(tokens, 4, dtype=torch.int32), window=spec.window, **plain
        ),
        "attention_index": call(
            swa.attention_index, q, cache, torch.empty(tokens, spec.window, dtype=torch.int32), **of_records, **plain
        ),
        "gather": call(swa.gather, cache, ids[:2], at[:2], **ring, dtype=shape.dtype, k=k, v=v),
    }
    return {op: made[op] for op in made if shape.every or op in MOST_REGISTERS}


def step_calls(width: int | None) -> dict[str, Call]:
    """prepare_decode with an index of `width` columns, or none."""
    one = torch.empty(9, dtype=torch.int32)
    options = {"spec": _ring(20, 6, 64), "num_slots": SLOTS, "draft_counts": one, "width": width}
    return {"prepare_decode": (swa.prepare_decode, (one.long(), one, one), {"kwargs": options})}


TABLE: dict[str, Callable[[], dict[str, Call]]] = {
    **{name: (lambda shape=shape: calls(shape)) for name, shape in SHAPES.items()},  # type: ignore[misc]
    **{f"index of {width}": (lambda width=width: step_calls(width)) for width in (None, 20, 128, 300)},  # type: ignore[misc]
}
"""Calls by name of the shape, or width of the index."""


def usage(call: Call, arch: str) -> KernelUsage:
    """The one kernel of the one configuration of a call: none was dropped, and none is left to a benchmark."""
    fn, args, options = call
    used = resource_usage(fn, *args, capability=ARCHS[arch], **options)
    (kernel,) = [one for one in used if one.name.startswith("triton_tem")]
    return kernel


def within(op: str, arch: str, kernel: KernelUsage) -> bool:
    """Whether the kernel fits in shared memory and spills no more than LIMITS."""
    spills = LIMITS.get(op.split(",")[0], 0)
    return kernel.shared_bytes <= CARDS[ARCHS[arch]].shared_bytes and kernel.spills <= spills


def rows_of(task: tuple[str, str]) -> list[dict[str, Any]]:
    """The rows of one shape on one architecture; what does not compile has an `error`."""
    name, arch = task
    rows = []
    for op, call in TABLE[name]().items():
        row: dict[str, Any] = {"arch": arch, "shape": name, "op": op}
        try:
            kernel = usage(call, arch)
        except Exception as error:  # whatever the compilers raise is what was asked for
            row["error"] = (str(error).strip() or type(error).__name__).splitlines()[-1]
        else:
            row |= {"warps": kernel.num_warps, "stages": kernel.num_stages, "registers": kernel.registers}
            row |= {"spills": kernel.spills, "shared_bytes": kernel.shared_bytes}
            row |= {} if within(op, arch, kernel) else {"error": "over its limit"}
        rows.append(row)
    return rows


def measure(shapes: Sequence[str], archs: Sequence[str], jobs: int) -> Iterator[dict[str, Any]]:
    tasks = [(shape, arch) for arch in archs for shape in shapes]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(rows_of, tasks):
            for row in rows:
                print("  ".join(f"{row.get(key, ''):>{width}}" for key, width in COLUMNS.items()), flush=True)
                yield row


COLUMNS = {
    "arch": 6,
    "shape": 20,
    "op": 19,
    "warps": 5,
    "stages": 6,
    "registers": 9,
    "spills": 6,
    "shared_bytes": 12,
    "error": 0,
}


def record(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, a line each, between those of the file that they do not replace."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "swa_inductor": swa.__version__}
    about = {"benchmark": "portability", "date": datetime.date.today().isoformat(), **versions}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {(row["arch"], row["shape"], row["op"]): row for row in [*before, *rows]}
    order = [(arch, shape, op) for arch in ARCHS for shape, made in TABLE.items() for op in made()]
    lines = ",\n".join("  " + json.dumps(found[key]) for key in order if key in found)
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.portability")
    parser.add_argument("--shapes", nargs="+", choices=TABLE, default=list(TABLE), metavar="SHAPE")
    parser.add_argument("--archs", nargs="+", choices=ARCHS, default=list(ARCHS), metavar="ARCH")
    parser.add_argument("--jobs", type=int, default=1, help="processes; one per core is right")
    parser.add_argument("--json", type=Path, help="file to write to; what it holds of other rows stays")
    args = parser.parse_args()
    print("  ".join(f"{key:>{width}}" for key, width in COLUMNS.items()))
    rows = list(measure(args.shapes, args.archs, args.jobs))
    if args.json:
        record(args.json, rows)
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
