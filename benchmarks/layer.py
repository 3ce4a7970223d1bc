"""The sliding layer of DeepSeek-V4 in a decode step of 6 tokens per sequence, and what it is made of, all in one run.

layer is the whole layer, compiled; GEMMs are its four products alone (of 6 tokens
also the copy between the output products). The rest is what stands between them, compiled
with the results of the products as inputs: front (merged projection to ring and low-rank query), attention (queries to
what the output projection reads) and back (between the two output projections). Columns with "plain" are the same parts
of a layer whose norms and RoPE are plain torch around `store` and `attention`, which Inductor makes kernels of its own.

    python -m benchmarks.layer [--shapes NAME ...] [--batches N ...] [--json FILE] [--check]

With --stack 20: a decode step of as many layers of V4.1-Flash with residual and RMSNorm, without MLPs, their rings in
one state, as one CUDA graph; beside its products alone. A layer with what joins it to the next is compiled as one
function, once for all layers.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import swa_inductor as swa
from benchmarks import _measure
from swa_inductor import records
from swa_inductor.models import deepseek_v4 as ds

SHAPES = {
    name: replace(config, tokens_per_step=6)
    for name, config in {"V4-Flash": ds.V4_FLASH, "V4.1-Flash": ds.V41_FLASH, "V4-Pro": ds.V4_PRO}.items()
}
SMALL = {"hidden_size": 48, "num_heads": 8, "q_lora_rank": 24, "o_groups": 4, "o_lora_rank": 16}
"""What --check makes of them."""
BATCHES = (1, 8, 64, 128, 256)
POSITIONS = 10_000
CALLS = 128
"""Calls in a graph at most. Inputs of small batches then stay in the L2 cache, where the products leave them."""


class PlainLayer(ds.SlidingAttention):
    """A decode step in which plain torch normalises and rotates."""

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin fp32 [T, head_dim], each angle twice, the sine first with a minus sign; 1 and 0 without RoPE."""
        cos, sin = self.table[positions].chunk(2, -1)
        rest = self.config.head_dim - self.config.rope_dim
        cos = F.pad(cos.repeat_interleave(2, -1), (rest, 0), value=1.0)
        return cos, F.pad(torch.stack((-sin, sin), -1).flatten(-2), (rest, 0))

    def forward(self, x: Tensor, state_ids: Tensor, positions: Tensor, *, cache: Tensor | None = None) -> Tensor:  # type: ignore[override]
        config, eps = self.config, self.config.rms_eps
        cache = self.cache if cache is None else cache
        assert cache is not None
        cos, sin = self.turns(positions)
        q_a, kv = self.qkv_a(x).split([config.q_lora_rank, config.head_dim], -1)
        kv = rotate_pairs(ds.rms_norm(kv, self.kv_norm, eps), cos, sin)
        swa.store(kv[:, None], None, cache, state_ids, positions, spec=self.spec)
        q = self.q_b(ds.rms_norm(q_a, self.q_a_norm, eps)).unflatten(-1, (config.num_heads, -1))
        if config.q_norm:
            q = ds.rms_norm(q, None, eps)
        q = rotate_pairs(q, cos[:, None], sin[:, None])
        how: dict[str, Any] = {"spec": self.spec, "sinks": self.sinks, "tokens_per_step": config.tokens_per_step}
        out = rotate_pairs(swa.attention(q, cache, state_ids, positions, **how), cos[:, None], -sin[:, None])
        return self.output(out)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of adjacent pairs, all dims at once: slices and `cat` would cost a kernel each."""
    y = x.float()
    return (y * cos + y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin).to(x.dtype)


def new_layer(config: ds.SlidingLayerConfig, slots: int | None, kind: type = ds.SlidingAttention) -> Any:
    """A layer with random weights, and rings of its own with random records unless `slots` is None."""
    with torch.device(_measure.DEVICE):
        cache = None if slots is None else _measure.random_cache(config.ring, slots)
        layer = kind(config, ds.rope_table(config, POSITIONS + config.tokens_per_step, _measure.DEVICE), cache)
    for weight in (layer.q_a_norm, layer.kv_norm, layer.sinks):
        nn.init.uniform_(weight, 0.5, 1.5)
    return layer


def step_inputs(config: ds.SlidingLayerConfig, batch: int, sets: int) -> list[tuple[Tensor, ...]]:
    """x, state_ids and positions of each call."""
    d, device = config.tokens_per_step, _measure.DEVICE
    made: list[tuple[Tensor, ...]] = []
    for slots in torch.randperm(batch * sets, device=device).int().chunk(sets):
        at, _ = _measure.sequences(torch.randint(config.ring.rows, POSITIONS, (batch,), device=device), d)
        x = torch.randn(batch * d, config.hidden_size, dtype=torch.bfloat16, device=device)
        made.append((x, slots.repeat_interleave(d), at))
    return made


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def require_as_good(what: str, value: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most 1.1 times as far from the layer in fp32 as the eager layer in bf16."""
    _measure.require_close(what, value, exact, 1.1 * error(plain, exact))


# ---------------------------------------------------------------------------------------------------- products


def products(layer: ds.SlidingAttention, x: Tensor, q_a: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    return layer.qkv_a(x), layer.queries(q_a), layer.output(out)


def product_inputs(config: ds.SlidingLayerConfig, tokens: int) -> tuple[Tensor, ...]:
    def random(*width: int) -> Tensor:
        return torch.randn(tokens, *width, dtype=torch.bfloat16, device=_measure.DEVICE)

    return random(config.hidden_size), random(config.q_lora_rank), random(config.num_heads, config.head_dim)


# ---------------------------------------------------------------------------------------------------- parts


class Part(NamedTuple):
    """What stands between one product and the next.

    Attributes:
        fn: of the tensors that `inputs` names, among them the product's result.
        inputs: nodes of the whole graph.
        result: the node that the next product reads.
    """

    fn: fx.GraphModule
    inputs: list[fx.Node]
    result: fx.Node


class Trace(fx.Interpreter):
    """Runs a graph and keeps the values of all nodes."""

    def run_node(self, node: fx.Node) -> Any:
        self.values[node] = super().run_node(node)
        return self.values[node]

    def trace(self, *args: Tensor) -> dict[fx.Node, Any]:
        self.values: dict[fx.Node, Any] = {}
        self.run(*args)
        return self.values


def graph_of(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """What torch.compile hands to a backend, and with what it calls the result: weights and rings too."""
    found: list[Any] = []

    def keep(graph: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        def call(*values: Tensor) -> Any:
            found.extend((graph, values))
            return graph(*values)

        return call

    torch._dynamo.reset()
    torch.compile(layer, backend=keep, fullgraph=True, dynamic=False)(*args)
    torch._dynamo.reset()
    return found[0], found[1]


def parts(graph: fx.GraphModule) -> Iterator[Part]:
    """Cut a layer at its products; writes to a ring go with the product that they depend on."""
    gemms = [node for node in graph.graph.nodes if node.target in (F.linear, torch.bmm)]
    writes = [node for node in graph.graph.nodes if "store" in str(node.target)]
    for gemm, following in zip(gemms, gemms[1:], strict=False):
        result = next(x for x in following.all_input_nodes if gemm in reach([x], gemms))  # the other one is a weight
        wanted = reach([result], gemms)
        for write in writes:
            if gemm in (behind := reach([write], gemms)):
                wanted |= behind
        piece, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), []
        ordered = [node for node in graph.graph.nodes if node in wanted]
        for node in ordered:
            if node.op == "placeholder" or node in gemms:
                copies[node] = piece.placeholder(node.name)
                inputs.append(node)
        for node in ordered:
            if node not in copies:
                copies[node] = piece.node_copy(node, copies.__getitem__)
        piece.output(copies[result])
        yield Part(fx.GraphModule(graph, piece), inputs, result)


def reach(nodes: list[fx.Node], stops: list[fx.Node]) -> set[fx.Node]:
    """Nodes that the given ones are computed from, themselves included, back to `stops`."""
    found, pending = set(nodes), [node for node in nodes if node not in stops]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                pending += [] if node in stops else [node]
    return found


NAMES = ("front", "attention", "back")


def measure_parts(layer: Any, inputs: list[tuple[Tensor, ...]], suffix: str) -> dict[str, float]:
    """Times of the parts, each checked against the eager layer."""
    graph, args = graph_of(layer, inputs[0])
    cache, before, spec = layer.cache, layer.cache.clone(), layer.spec
    values = Trace(graph).trace(*args)
    written, times = cache.clone(), {}
    _, ids, at = inputs[0]

    def stored(cache: Tensor) -> Tensor:
        return records.decode_record(cache[ids.long(), at % spec.rows], spec.kv_format, spec.head_dim, None)[0]

    for name, part in zip(NAMES, parts(graph), strict=True):
        step, first = _measure.compiled(part.fn), [values[node] for node in part.inputs]
        cache.copy_(before if name == "front" else written)  # timed calls have written other vectors
        got, want = step(*first), values[part.result]
        _measure.require_close(f"{name}{suffix}", got, want, 2e-2)  # both round to bf16
        if (
            name == "front"
        ):  # what kernels round less often goes to the neighbouring code: the step of e4m3 is 6 to 12 %
            _measure.require_close(f"ring{suffix}", stored(cache), stored(written), 3e-2)
        fresh = [values[node] for node in part.inputs if node.op != "placeholder"]
        if any(want.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in fresh):
            times[name + suffix] = 0.0  # a view: nothing is launched
            continue
        calls = min(CALLS, _measure.copies(_measure.bytes_of(*fresh, want)))
        times[name + suffix] = _measure.microseconds(step, list(rotated(part, values, inputs, calls)), target_ms=50)
    return times


def rotated(
    part: Part, values: dict[fx.Node, Any], inputs: list[tuple[Tensor, ...]], calls: int
) -> Iterator[tuple[Tensor, ...]]:
    """Arguments of `calls` calls of a part: other results of products, other sequences."""
    for call in range(calls):
        now = dict(zip(map(id, inputs[0]), inputs[call % len(inputs)], strict=True))
        yield tuple(
            now.get(id(values[node]), values[node]) if node.op == "placeholder" else torch.randn_like(values[node])
            for node in part.inputs
        )


# ---------------------------------------------------------------------------------------------------- one layer


def measure(name: str, batch: int, small: bool) -> dict[str, Any]:
    config = replace(SHAPES[name], **SMALL) if small else SHAPES[name]
    sets = 4
    layer = new_layer(config, batch * sets)
    inputs = step_inputs(config, batch, sets)
    before = layer.cache.clone()
    plain = layer(*inputs[0])
    layer.cache.copy_(before)
    exact = copy.deepcopy(layer).float()(inputs[0][0].float(), *inputs[0][1:])
    step = _measure.compiled(layer)
    require_as_good(f"{name}, {batch} sequences", step(*inputs[0]), exact, plain)
    row: dict[str, Any] = {"layer": name, "sequences": batch, "tokens": batch * config.tokens_per_step}
    row["us"] = _measure.microseconds(step, inputs)
    # Weights are larger than the L2 cache: two calls are enough.
    row["GEMMs"] = _measure.microseconds(products_of(layer), [product_inputs(config, row["tokens"])] * 2)
    row |= measure_parts(layer, inputs, "")
    other = new_layer(config, None, PlainLayer)
    other.load_state_dict(layer.state_dict())
    other.cache = layer.cache
    return row | measure_parts(other, inputs, ", plain")


def products_of(layer: ds.SlidingAttention) -> Callable[..., Any]:
    return lambda *args: products(layer, *args)


# ---------------------------------------------------------------------------------------------------- many layers


class Stack(nn.Module):
    """Attention layers with residual and RMSNorm around each; their rings are the stored rings of one state."""

    def __init__(self, config: ds.SlidingLayerConfig, count: int) -> None:
        super().__init__()
        self.config, self.layout = config, swa.StateLayout([config.ring] * count)
        self.layers = nn.ModuleList(new_layer(config, None) for _ in range(count))
        ones = torch.ones(count + 1, config.hidden_size, dtype=torch.bfloat16, device=_measure.DEVICE)
        self.norms = nn.Parameter(ones)
        self.block: Callable[..., tuple[Tensor, Tensor]] = self.join

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_eps)

    def join(self, layer: nn.Module, weight: Tensor, x: Tensor, y: Tensor, *where: Tensor) -> tuple[Tensor, Tensor]:
        """A layer, the residual, and the norm in front of the next layer."""
        state_ids, positions, cache = where
        x = x + layer(y, state_ids, positions, cache=cache)
        return x, self.norm(x, weight)

    def forward(self, x: Tensor, state_ids: Tensor, positions: Tensor, state: Tensor) -> Tensor:
        y = self.norm(x, self.norms[0])
        for i, layer in enumerate(self.layers):
            cache = self.layout.stored_view(state, i)
            x, y = self.block(layer, self.norms[i + 1], x, y, state_ids, positions, cache)
        return y


def measure_stack(count: int, batch: int, small: bool) -> dict[str, Any]:
    config = replace(SHAPES["V4.1-Flash"], **SMALL) if small else SHAPES["V4.1-Flash"]
    sets = 2
    stack = Stack(config, count)
    state = stack.layout.allocate(batch * sets, _measure.DEVICE)
    for i in range(count):
        stack.layout.stored_view(state, i).copy_(_measure.random_cache(config.ring, batch * sets))
    torch._dynamo.mark_static_address(state)
    inputs = [(*some, state) for some in step_inputs(config, batch, sets)]
    x, *where = inputs[0][:3]
    plain = stack(x, *where, state.clone())
    wide = copy.deepcopy(stack).float()
    wide.block = wide.join
    exact = wide(x.float(), *where, state.clone())
    del wide
    stack.block = _measure.compiled(stack.join)
    with torch._dynamo.config.patch(error_on_recompile=True):
        require_as_good(f"{count} layers, {batch} sequences", stack(*inputs[0]), exact, plain)
    row: dict[str, Any] = {"layers": count, "sequences": batch, "tokens": batch * config.tokens_per_step}
    row["us"] = _measure.microseconds(stack, inputs)
    given = product_inputs(config, row["tokens"])

    def gemms(*args: Tensor) -> list[tuple[Tensor, ...]]:
        return [products(layer, *args) for layer in stack.layers]  # type: ignore[arg-type]

    row["GEMMs"] = _measure.microseconds(gemms, [given])
    return row | {"us per layer": row["us"] / count, "GEMMs per layer": row["GEMMs"] / count}


def warm(args: argparse.Namespace) -> None:
    """Compile everything in processes of their own first."""
    if args.stack:
        _measure.warm("layer", [["--stack", str(args.stack), "--batches", str(b)] for b in args.batches])
    else:
        _measure.warm("layer", [["--shapes", s, "--batches", str(b)] for s in args.shapes for b in args.batches])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    args.batches = args.batches or ((2,) if args.check else (1, 8, 64, 256) if args.stack else BATCHES)
    if not args.check and not args.warm:
        warm(args)
    with torch.no_grad():
        if args.stack:
            return [measure_stack(args.stack, batch, args.check) for batch in args.batches]
        return [measure(name, batch, args.check) for name in args.shapes for batch in args.batches]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--stack", type=int, help="measure a step of so many layers instead")


if __name__ == "__main__":
    _measure.report("layer", run, options)
