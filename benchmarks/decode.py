"""attention in a decode step, read from the rings, beside what else computes it, all in one run.

copy is a pointwise copy of q to out, which no attention can undercut by much. SDPA, FlexAttention and bmm (compiled
bmm + softmax + bmm) are handed the window of each sequence gathered, contiguous and in bf16, so their times hold no
gather and no dequantisation. ring is what plain torch makes of the same rings: index, dequantise, bmm, compiled. SDPA
and FlexAttention leave sinks out. Of several ways to call one of them the fastest counts, and is named.

    python -m benchmarks.decode [--shapes NAME ...] [--only NAME ...] [--json FILE] [--plot FILE.png] [--check]

The figures of a file become a picture without a GPU: `--plot FILE.png --figures FILE.json`. --check compares all with
fp64 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor import records, reference


@dataclass(frozen=True)
class Model:
    """Attention shape of a model's sliding layers."""

    name: str
    spec: swa.RingSpec
    heads: int
    sinks: bool

    @property
    def scale(self) -> float:
        return self.spec.head_dim**-0.5

    @property
    def keys(self) -> int:
        """Keys that the queries of a sequence see together."""
        return self.spec.window + self.spec.tokens_per_step - 1


V4 = swa.RingSpec(128, 6, 512, shared_kv=True)
MODELS = {
    "v4-64": Model("V4, 64 heads", V4, 64, True),
    "v4-128": Model("V4, 128 heads", V4, 128, True),
    "gpt-oss": Model("gpt-oss", swa.RingSpec(128, 1, 64, num_kv_heads=8, kv_format="bf16"), 64, True),
    "gemma-3-4b": Model("Gemma 3 4B", swa.RingSpec(1024, 1, 256, num_kv_heads=4, kv_format="bf16"), 8, False),
    "gemma-3-270m": Model("Gemma 3 270M", swa.RingSpec(512, 1, 256, kv_format="bf16"), 4, False),
}
BATCHES = (1, 8, 64, 256)


class Case:
    """Inputs of one shape: rings, and for each call queries, slots of the sequences and positions of the queries."""

    def __init__(self, model: Model, batch: int, sets: int | None = None) -> None:
        spec, d = model.spec, model.spec.tokens_per_step
        self.model, self.batch = model, batch
        q_bytes = batch * d * model.heads * spec.head_dim * 2
        self.moved = 2 * q_bytes + batch * model.keys * spec.num_kv_heads * spec.record_bytes
        sets = sets or _measure.copies(self.moved)
        device: dict[str, Any] = {"device": _measure.DEVICE}
        self.cache = _measure.random_cache(spec, batch * sets)
        self.slots = torch.randperm(batch * sets, **device).int().chunk(sets)
        self.sinks = torch.randn(model.heads, **device) if model.sinks else None
        starts = [torch.randint(spec.rows, 10_000, (batch,), **device) for _ in range(sets)]
        self.positions = [_measure.sequences(start, d)[0] for start in starts]
        shape = batch * d, model.heads, spec.head_dim
        self.queries = [torch.randn(shape, dtype=torch.bfloat16, **device) for _ in range(sets)]
        self._windows: list[tuple[Tensor, Tensor]] = []

    def windows(self) -> list[tuple[Tensor, Tensor]]:
        """K and V [B, H_kv, keys, D] of each call in bf16; one tensor where K = V."""
        if not self._windows:
            spec = self.model.spec
            for slots, at in zip(self.slots, self.positions, strict=True):
                rows = window_rows(at, spec)[0] % spec.rows
                stored = self.cache[slots.long()[:, None], rows]
                k, v = records.decode_record(stored, spec.kv_format, spec.head_dim, spec.v_head_dim)
                k = k.to(torch.bfloat16).transpose(1, 2).contiguous()
                v = k if spec.shared_kv else v.to(torch.bfloat16).transpose(1, 2).contiguous()
                self._windows.append((k, v))
        return self._windows

    def exact(self, sinks: bool) -> Tensor:
        """Output of the last queries of the first call, in fp64."""
        spec, last = self.model.spec, slice(-64, None)
        ids = self.slots[0].repeat_interleave(spec.tokens_per_step)
        what = self.queries[0][last], self.cache, ids[last], self.positions[0][last], None
        how = spec.window, self.model.scale, spec.kv_format, spec.v_head_dim, None, torch.float64
        return reference.attention(*what, self.sinks if sinks else None, *how)[0]


def window_rows(positions: Tensor, spec: swa.RingSpec) -> tuple[Tensor, Tensor]:
    """Positions of the keys of each sequence [B, keys], and which of them its queries see [B, tokens, keys]."""
    w, d = spec.window, spec.tokens_per_step
    token = torch.arange(d, device=positions.device)[:, None]
    key = torch.arange(w + d - 1, device=positions.device)
    at = positions[::d, None] - w + 1 + key
    return at, (key >= token) & (key < token + w) & (at >= 0)[:, None]


def fold(q: Tensor, model: Model) -> Tensor:
    """q [T, H, D] -> [B, H_kv, tokens * G, D]: heads that share keys are rows; a view for all MODELS."""
    d, kv_heads = model.spec.tokens_per_step, model.spec.num_kv_heads
    q = q.unflatten(0, (-1, d)).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])


def unfold(out: Tensor, model: Model) -> Tensor:
    """The reverse of `fold`."""
    d = model.spec.tokens_per_step
    return out.unflatten(2, (d, -1)).transpose(1, 2).reshape(-1, model.heads, out.shape[-1])


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor | None, model: Model) -> Tensor:
    """Attention in plain torch with two products of bf16; `visible` [B or 1, tokens, keys], None for all."""
    d = model.spec.tokens_per_step
    scores = (fold(q, model) @ k.transpose(2, 3)).float() * model.scale
    scores = scores.unflatten(2, (d, -1))  # [B, H_kv, tokens, G, keys]
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, :, None], -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(1, model.spec.num_kv_heads, 1, -1, 1)
        top = torch.maximum(top, sinks)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return unfold((p / total).to(v.dtype).flatten(2, 3) @ v, model)


# ---------------------------------------------------------------------------------------------------- contenders

Way = tuple[str, Callable[..., Tensor], list[_measure.Inputs]]
"""A way to compute it: its name, a function, and the arguments of each call."""


def ours(case: Case) -> Iterator[Way]:
    spec, d = case.model.spec, case.model.spec.tokens_per_step

    def fn(q: Tensor, cache: Tensor, ids: Tensor, at: Tensor, sinks: Tensor | None) -> Tensor:
        return swa.attention(q, cache, ids, at, spec=spec, sinks=sinks, tokens_per_step=d)

    every = zip(case.queries, case.slots, case.positions, strict=True)
    inputs: list[_measure.Inputs] = [
        (q, case.cache, slots.repeat_interleave(d), at, case.sinks) for q, slots, at in every
    ]
    yield "", _measure.compiled(fn), inputs


def copy(case: Case) -> Iterator[Way]:
    yield "", _measure.compiled(lambda q: q.clone()), [(q,) for q in case.queries]


def sdpa(case: Case) -> Iterator[Way]:
    """Heads folded into rows, by every backend there is; the mask is a sum, made beforehand."""
    model, mask = case.model, None
    if model.spec.tokens_per_step > 1:
        seen = window_rows(case.positions[0], model.spec)[1][:1].repeat_interleave(model.heads, 1)
        bias = torch.zeros(*seen.shape[:2], -(-model.keys // 16) * 16, dtype=torch.bfloat16, device=seen.device)
        mask = bias[None, ..., : model.keys].masked_fill_(~seen, -math.inf)  # rows begin at multiples of 32 bytes

    def by(backend: SDPBackend) -> Callable[..., Tensor]:
        def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                rows = fold(q, model)
                bias = None if mask is None else mask.expand(len(rows), -1, -1, -1)
                out = torch.nn.functional.scaled_dot_product_attention(rows, k, v, bias, scale=model.scale)
            return unfold(out, model)

        return fn

    inputs: list[_measure.Inputs] = [(q, *kv) for q, kv in zip(case.queries, case.windows(), strict=True)]
    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    for name in backends if _measure.DEVICE == "cuda" else ("MATH",):
        yield name, by(getattr(SDPBackend, name)), inputs


FLEX_OPTIONS: dict[int, list[tuple[bool, dict[str, int]]]] = {
    64: [(False, {})],
    256: [(False, {}), (True, {})],
    512: [
        (True, {}),
        (True, {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}),
        (True, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 1}),
        (True, {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}),
    ],
}
"""For each head_dim: whether heads are rows, and kernel options.

The decoding kernel, which shares keys among the heads of GQA, does not take 6 x 64 rows of 512 values (torch 2.11).
"""


def flex(case: Case) -> Iterator[Way]:
    """With GQA, which takes the decoding kernel, and with heads folded into rows; the mask is made beforehand."""
    model, d, w = case.model, case.model.spec.tokens_per_step, case.model.spec.window

    def fn_of(folded: bool, options: dict[str, int]) -> Callable[..., Tensor]:
        rows = model.heads // model.spec.num_kv_heads if folded else 1
        mask = create_block_mask(
            lambda b, h, i, j: (j >= i // rows) & (j < i // rows + w),
            *(None, None, d * rows, model.keys),
            device=_measure.DEVICE,
        )

        def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = fold(q, model) if folded else q.unflatten(0, (-1, d)).transpose(1, 2)
            how: dict[str, Any] = {"block_mask": mask, "scale": model.scale, "enable_gqa": not folded}
            out = flex_attention(q, k, v, **how, kernel_options=options)
            return unfold(out, model) if folded else out.transpose(1, 2).flatten(0, 1)

        return fn

    inputs: list[_measure.Inputs] = [(q, *kv) for q, kv in zip(case.queries, case.windows(), strict=True)]
    for folded, options in FLEX_OPTIONS[model.spec.head_dim]:
        name = " ".join(["folded" if folded else "gqa", *(f"{key}={value}" for key, value in options.items())])
        yield name, _measure.compiled(fn_of(folded, options)), inputs


def bmm(case: Case) -> Iterator[Way]:
    model = case.model

    def fn(q: Tensor, k: Tensor, v: Tensor, at: Tensor, sinks: Tensor | None) -> Tensor:
        seen = window_rows(at[: model.spec.tokens_per_step], model.spec)[1] if model.spec.tokens_per_step > 1 else None
        return attend(q, k, v, seen, sinks, model)

    every = zip(case.queries, case.windows(), case.positions, strict=True)
    yield "", _measure.compiled(fn), [(q, *kv, at, case.sinks) for q, kv, at in every]


def ring(case: Case) -> Iterator[Way]:
    """Rings of raw values as tensors of their dtype, which saves torch a copy of the cache."""
    model, spec, cache = case.model, case.model.spec, case.cache
    dim = spec.head_dim
    if spec.kv_format != "mxfp8":
        cache = cache.view(records.RAW_DTYPES[spec.kv_format])

    def fn(q: Tensor, cache: Tensor, slots: Tensor, at: Tensor, sinks: Tensor | None) -> Tensor:
        where, seen = window_rows(at, spec)
        stored = cache[slots.long()[:, None], where % spec.rows].transpose(1, 2)
        if spec.kv_format == "mxfp8":
            scale = torch.exp2(stored[..., dim:].float() - 127)
            data = stored[..., :dim].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
            k = v = (data * scale[..., None]).flatten(-2).to(q.dtype)
        else:
            k, v = stored.split(dim, -1)
        return attend(q, k, v, seen, sinks, model)

    every = zip(case.queries, case.slots, case.positions, strict=True)
    yield "", _measure.compiled(fn), [(q, cache, slots, at, case.sinks) for q, slots, at in every]


CONTENDERS: dict[str, Callable[[Case], Iterator[Way]]] = {
    "swa_inductor": ours,
    "copy": copy,
    "SDPA": sdpa,
    "FlexAttention": flex,
    "bmm": bmm,
    "ring": ring,
}
LIMITS = {"bmm": 2e-2, "ring": 2e-2}
"""Error that may be had, relative to fp64; default 5e-3. Scores of plain products are rounded to bf16."""
SINKLESS = ("SDPA", "FlexAttention")


def fastest(name: str, case: Case, want: Tensor | None) -> tuple[float | None, str]:
    """Time of the fastest way that works, and its name. A way that fails gives a line on stderr where none works."""
    best: tuple[float | None, str] = (None, "")
    problems = []
    ways = CONTENDERS[name](case)
    while True:
        label = name
        try:
            label, step, inputs = next(ways)
            got = step(*inputs[0])
            if want is not None:
                error = float((got[-len(want) :].double() - want).norm() / want.norm())
                if not error <= LIMITS.get(name, 5e-3):
                    raise ArithmeticError(f"error {error:.2e}")
            took = _measure.microseconds(step, inputs, target_ms=75)
        except StopIteration:
            break
        except Exception as error:  # does not fit, is not supported: the next way may be
            problems.append(f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if best[0] is None or took < best[0]:
            best = took, label
    if _measure.DEVICE == "cpu" and problems:
        raise SystemExit("; ".join(problems))
    if best[0] is None:
        print(f"{name}, {case.model.name}, {case.batch} sequences: {'; '.join(problems)}", file=sys.stderr, flush=True)
    return best


def measure(model: Model, batch: int, names: list[str], few: bool) -> dict[str, Any]:
    case = Case(model, batch, sets=2 if few else None)
    d = model.spec.tokens_per_step
    row: dict[str, Any] = {"model": model.name, "sequences": batch, "tokens": batch * d}
    exact, ways = [case.exact(sinks) for sinks in (False, True)], {}
    for name in names:
        want = None if name == "copy" else exact[name not in SINKLESS]
        row[name], way = fastest(name, case, want)
        if way:
            ways[f"{name} by"] = way
    row["MB moved"] = case.moved / 1e6
    if row.get("swa_inductor"):
        row["GB/s"] = case.moved / row["swa_inductor"] / 1e3
    return row | ways


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    batches = args.batches or ((3,) if args.check else BATCHES)
    if args.figures:
        rows = json.loads(args.figures.read_text())["rows"]
    else:
        if not args.check and not args.warm:
            each = [["--shapes", shape, "--batches", str(batch)] for shape in args.shapes for batch in batches]
            _measure.warm("decode", [[*some, "--only", *args.only] for some in each])
        rows = [measure(MODELS[shape], batch, args.only, args.warm) for shape in args.shapes for batch in batches]
    if args.plot:
        plot(rows, args.plot)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for name in CONTENDERS:
            points = [(row["sequences"], row[name]) for row in rows if row["model"] == model and row.get(name)]
            if points:
                axes.loglog(
                    *zip(*points, strict=True), marker="o", label=name, linewidth=2 if name == "swa_inductor" else 1
                )
        axes.set_title(model)
        axes.set_xlabel("sequences")
        axes.set_xticks(BATCHES, map(str, BATCHES))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("us")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--plot", type=Path, help="file to draw the figures into; needs matplotlib")
    parser.add_argument("--figures", type=Path, help="draw those of this file, and measure nothing")


if __name__ == "__main__":
    _measure.report("decode", run, options)
