"""The only door to private Inductor names: everything that differs between torch versions is settled here.

Supported: torch 2.11 to 2.15. The rest of the package imports these names and none of `torch._inductor`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

SUPPORTED_TORCH = ((2, 11), (2, 15))

# Before the imports below, of which another torch may lack some.
_version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
if not SUPPORTED_TORCH[0] <= _version <= SUPPORTED_TORCH[1]:
    warnings.warn(
        f"swa_inductor supports torch {SUPPORTED_TORCH[0][0]}.{SUPPORTED_TORCH[0][1]} to "
        f"{SUPPORTED_TORCH[1][0]}.{SUPPORTED_TORCH[1][1]}; this is torch {torch.__version__}",
        stacklevel=2,
    )

from torch._inductor import config, ir
from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.ir import ir_node_to_tensor
from torch._inductor.lowering import empty_strided, fallback_handler, lowerings, register_lowering
from torch._inductor.runtime import triton_helpers as runtime_helpers
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.select_algorithm import (
    SymbolicGridFn,
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
    realize_inputs,
)
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from swa_inductor.errors import UnsupportedError
from swa_inductor.meta._library import NAMESPACE, OPS

__all__ = [
    "HeuristicType",
    "TritonTemplate",
    "TritonTemplateKernel",
    "arange",
    "cache_dir",
    "copy_to",
    "counters",
    "cudagraph_recordings",
    "empty_buffer",
    "fixed_layout",
    "index_put",
    "inline",
    "int_of",
    "known_int",
    "known_strides",
    "likely_int",
    "lower",
    "render_template",
    "runtime_helpers",
    "triton_cache_dir",
    "triton_heuristics",
    "triton_template",
]


def lower(op: Any, *, cuda: Callable[..., Any], cpu: Callable[..., Any] | None) -> None:
    """Register the lowering of an op: `cuda` builds a Triton template, `cpu` builds IR; None leaves the op a call.

    A package of AOTInductor calls no Python: there the eager implementation is lowered in place of such a call. It may
    then read no value, takes all tokens at once, and is slower for it.
    """
    call_op = fallback_handler(op, add_to_fallback_set=False)
    eager = OPS[op.name().removeprefix(f"{NAMESPACE}::").removesuffix(".default")]

    def without_template(*args: Any, **kwargs: Any) -> Any:
        return _inline_call(eager, args, kwargs) if V.graph.aot_mode else call_op(*args, **kwargs)

    def lowering(*args: Any, **kwargs: Any) -> Any:
        device = next(a for a in args if isinstance(a, ir.TensorBox)).get_device_or_error()
        if device.type == "cuda":
            return cuda(*args, **kwargs)
        if device.type == "cpu":
            return (cpu or without_template)(*args, **kwargs)
        raise UnsupportedError(f"{op}: got tensors on {device}; allowed: cuda, cpu")

    register_lowering(op, type_promotion_kind=None)(lowering)


def triton_template(
    name: str, grid: Callable[..., Any], source: str, kind: type[TritonTemplate] = TritonTemplate
) -> TritonTemplate:
    """A template under a process-global, unique name."""
    return kind(name=f"swa_{name}", grid=SymbolicGridFn(grid), source=source)


def render_template(
    template: TritonTemplate,
    inputs: Sequence[Any],
    layout: Any,
    *,
    mutated: Sequence[int] = (),
    producers: Sequence[int] = (),
    gathers: bool = True,
    call_sizes: Sequence[Any],
    variants: Sequence[dict[str, Any]] = (),
    examples: Mapping[int, Callable[[list[int], torch.device], torch.Tensor]] | None = None,
    **constants: Any,
) -> Any:
    """One kernel launch. `inputs[i]` for i in `mutated` are written in place; producers of `producers` may be fused,
    those that look up their elements by an index only with `gathers`.

    `constants`: those of the template, num_warps and num_stages. With max_autotune, `variants`, which replace some of
    them, are timed beside them, unless a CUDA graph is being captured; `examples[i]` makes inputs[i] for that, from its
    size: of random metadata a kernel would make nothing.
    """
    nodes = list(realize_inputs(*inputs))
    for node in nodes:
        node.freeze_layout()
    choices: list[Any] = []
    for variant in ({}, *(variants if _may_explore() else ())):
        error = template.maybe_append_choice(
            choices,
            input_nodes=tuple(nodes),
            layout=layout,
            mutated_inputs=[nodes[i] for i in mutated],
            call_sizes=list(call_sizes),
            **{**constants, **variant},
        )
        if error is not None and not choices:
            raise UnsupportedError(f"{template.name}: {error}")
    made = {i: partial(_example, make) for i, make in (examples or {}).items()}
    out = autotune_select_algorithm(template.name, choices, nodes, layout, input_gen_fns=made)
    if isinstance(out, tuple):  # from 2.13 the selected choice comes along
        out = out[0]
    _allow_producers(out, nodes, producers, [nodes[i] for i in mutated], gathers)
    return out


def _may_explore() -> bool:
    return bool(config.max_autotune) and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _example(make: Callable[[list[int], torch.device], torch.Tensor], node: Any) -> torch.Tensor:
    return make([likely_int(size, 1024) for size in node.get_size()], node.get_device())


def _allow_producers(
    out: Any, nodes: Sequence[Any], producers: Sequence[int], mutated: Sequence[Any], gathers: bool
) -> None:
    """Let pointwise producers fuse in front of a template.

    Inductor's heuristics refuse producers that upcast or read more bytes than they write (a slice of a merged
    projection counts whole). Both are worth it here: each element is read by one program only. From 2.13 on, templates
    with mutated inputs are refused too, unless they say that nothing aliases; before, nobody asks. So that is settled
    here: a producer that reads what the kernel writes would see rows that other programs have written already. An input
    that is also read from memory, under another name, must be there.
    """
    buffer = out.data.data
    buffer.has_aliasing_or_mutation_for_prologue_fusion = lambda node: False
    written = {node.get_name() for node in mutated}
    for i, node in enumerate(nodes):
        if i not in producers:
            buffer.allowed_prologue_inps.discard(node.get_name())
    for node in (nodes[i] for i in producers):
        data = node.data if isinstance(node, ir.StorageBox) else node
        if not isinstance(data, ir.ComputedBuffer):
            continue
        reads: Any = data.get_reads()
        looked_up = any(read.is_indirect() for read in reads)
        if written & {read.name for read in reads} or (looked_up and not gathers):
            buffer.allowed_prologue_inps.discard(data.get_name())
        else:
            V.graph.invoke_quant_ops.add(data.get_operation_name())


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """Contiguous layout of a new tensor."""
    return ir.FixedLayout(device, dtype, list(size), ir.FlexibleLayout.contiguous_strides(list(size)))


def empty_buffer(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """An uninitialised tensor, for a template to write as a mutated input."""
    return empty_strided(list(size), None, dtype=dtype, device=device)


def int_of(size: Any) -> int:
    """A size as a Python int, guarding on it: for dims that are model constants."""
    return V.graph.sizevars.guard_int(size)


def known_int(size: Any) -> int | None:
    """A size if it is known at compile time, without guarding on it."""
    return int(size) if getattr(size, "is_number", isinstance(size, int)) else None


def known_strides(node: Any) -> list[int | None]:
    """Strides of a tensor that a kernel reads from memory, where the graph now puts it if it computes it itself."""
    node = realize_inputs(node)
    node.freeze_layout()
    return [known_int(stride) for stride in node.get_stride()]


def likely_int(size: Any, otherwise: int) -> int:
    """A size as it was in the call that is compiled, without guarding on it; `otherwise` where it depends on data."""
    return V.graph.sizevars.optimization_hint(size, fallback=otherwise)


def counters(device: torch.device, count: int) -> Any:
    """int32 zeros [count] that all kernels of a graph share: each kernel leaves them as zeros again."""
    shared = V.graph.__dict__.setdefault("_swa_counters", {})
    if device not in shared:
        shared[device] = lowerings[torch.ops.aten.full.default]([count], 0, dtype=torch.int32, device=device)
        shared[device].realize()
    return shared[device]


_RECOMPUTE = {
    "realize_opcount_threshold": 10**6,
    "realize_reads_threshold": 10**6,
    "unroll_reductions_threshold": 1,  # an unrolled sum is pointwise too: recomputed in each of its readers' readers
}


def inline(fn: Callable[..., Any], *nodes: Any, recompute: bool = False) -> Any:
    """Trace a torch function over IR nodes (None allowed) and lower what it does, in place of the op.

    With `recompute` no pointwise intermediate is kept, however long and however often it is read: right for integer
    arithmetic on small tensors, where a launch costs more than to compute a value again. Sums are kept.
    """
    present = [n for n in nodes if n is not None]

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return fn(*(None if n is None else next(rest) for n in nodes))

    with V.fake_mode:
        fakes = [ir_node_to_tensor(n) for n in present]
        graph = make_fx(call, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)
    with config.patch(_RECOMPUTE if recompute else {}):
        return inline_subgraph_to_ir_nodes(graph, present, "swa_inline")


def _inline_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`inline` of fn(*args, **kwargs), where any argument may be an IR node."""
    leaves, form = tree_flatten((args, kwargs))
    nodes = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, ir.IRNode)}

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)
        return fn(*args, **kwargs)

    return inline(call, *nodes.values())


def arange(length: Any, device: torch.device) -> Any:
    """0, 1, .. as int64, for `inline`: it carries a size that no other argument has."""
    return lowerings[torch.ops.prims.iota.default](
        length, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )


def index_put(target: Any, indices: Sequence[Any], values: Any) -> None:
    """target[indices] = values, in place."""
    lowerings[torch.ops.aten.index_put_.default](target, list(indices), values)


def copy_to(target: Any, value: Any) -> None:
    """target[...] = value, in place: the loop that computes `value` writes there."""
    lowerings[torch.ops.aten.copy_.default](target, value)


def cudagraph_recordings() -> int:
    """CUDA graphs that `mode="reduce-overhead"` has recorded and kept in this process, all devices."""
    from torch._inductor import cudagraph_trees

    if not torch.cuda.is_available():
        return 0
    return sum(
        _recorded(cudagraph_trees.get_manager(i, create_if_none_exists=False)) for i in range(torch.cuda.device_count())
    )


def _recorded(manager: Any) -> int:
    if manager is None:
        return 0
    pending = [node for nodes in manager.roots.values() for node in nodes]
    count = 0
    while pending:
        count += 1
        pending.extend(child for children in pending.pop().children.values() for child in children)
    return count
