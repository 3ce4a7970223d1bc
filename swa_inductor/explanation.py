"""What torch.compile makes of a function: the kernels that it launches, the fusions that it refused, and advice."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from swa_inductor.testing import generate_code
from swa_inductor.testing._schedule import Launch, watch_schedule


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: of the Triton kernel, or of the library function that is called.
        kind: "template" (a Triton kernel from a template, as ours are), "triton" (one that Inductor wrote) or "extern".
        op: the operator that a template or a library function computes, such as "swa_inductor.attention" or "aten.mm";
            None for kernels that Inductor wrote.
        contains: the other operators that are computed in the kernel, in order, each named once. Views are left out,
            and so is what other launches compute.
        functions: the functions of the model, or around it, that say so.
    """

    name: str
    kind: str
    op: str | None
    contains: tuple[str, ...]
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Two launches that are not one.

    Attributes:
        producer, consumer: positions in `Explanation.kernels`; the consumer reads what the producer writes.
        reason: Inductor's, from its fusion log.
    """

    producer: int
    consumer: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; as a string, a table.

    Attributes:
        kernels: every launch, in order.
        refused: fusions with templates of this package that Inductor considered and refused.
        advice: plain code around the ops that takes a kernel of its own and that the ops can do themselves.
    """

    kernels: tuple[Kernel, ...]
    refused: tuple[Refusal, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(str(i), k.kind, k.op or ", ".join(k.functions), _parts(k)) for i, k in enumerate(self.kernels)]
        table = [("", "kind", "computes", "contains"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in table]
        if self.refused:
            lines += ["", "fusions that Inductor refused"]
            lines += [f"{r.producer} and {r.consumer}: {r.reason}" for r in self.refused]
        if self.advice:
            lines += ["", "advice", *self.advice]
        return "\n".join(lines)


def _parts(kernel: Kernel) -> str:
    return ", ".join(part.removeprefix("aten.") for part in kernel.contains)


def explain(
    fn: Callable[..., Any], *args: Any, capability: tuple[int, int] | None = None, **options: Any
) -> Explanation:
    """Say what `torch.compile(fn)(*args)` launches on a GPU, which need not be there. Nothing runs, nothing is written.

    Args:
        fn: a function, or a module.
        args: what it is called with, tensors on any device, fake and meta tensors included; their values do not matter.
        capability: compute capability (major, minor) of the GPU; default: that of this machine's GPU if an argument is
            on it, else (9, 0).
        options: the other keyword arguments of `swa_inductor.testing.generate_code`, such as kwargs, mode,
            static_inputs and dynamic_inputs.

    Returns:
        An `Explanation`; `print` shows it as a table.

    Raises:
        ValueError: a capability of no known card, or fn does not compile to exactly one graph.
        RuntimeError: no C++ compiler on a machine without a GPU.
        Exception: whatever tracing or lowering raises, as torch.compile wraps it.
    """
    if capability is None:
        on_gpu = torch.cuda.is_available() and any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    with watch_schedule() as schedule:
        generate_code(fn, *args, capability=capability, **options)
    launches = schedule.launches
    kernels = tuple(_kernel(launch) for launch in launches)
    ours = [k.kind == "template" and str(k.op).startswith("swa_inductor.") for k in kernels]
    refused = tuple(Refusal(a, b, why) for a, b, why in schedule.refused if ours[a] or ours[b])
    return Explanation(kernels, refused, tuple(dict.fromkeys(_advice(launches))))


# ---------------------------------------------------------------------------------------------------- launches


def _kernel(launch: Launch) -> Kernel:
    others = [node for node in launch.nodes if node is not launch.main and not _is_view(node)]
    functions = map(_function, [launch.main] if launch.kind == "extern" and launch.main else others)
    return Kernel(
        launch.name,
        launch.kind,
        None if launch.main is None else _op_name(launch.main),
        tuple(dict.fromkeys(map(_op_name, others))),
        tuple(dict.fromkeys(name for name in functions if name)),
    )


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "swa_inductor"


_GEMMS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm"}


def _is_gemm(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in _GEMMS


def _is_view(node: fx.Node) -> bool:
    """Whether a node only looks at values in another way."""
    schema = _schema(node)
    if schema is None:
        return node.target is operator.getitem
    alias = [value.alias_info for value in schema.returns if value.alias_info is not None]
    return any(not info.is_write for info in alias) or schema.name == "aten::_unsafe_view"


def _op_name(node: fx.Node) -> str:
    """The operator as it was before decomposition: 'aten.mean'."""
    target = node.meta.get("original_aten") or node.target
    return str(target.overloadpacket) if isinstance(target, torch._ops.OpOverload) else str(target)


_TORCH = str(Path(torch.__file__).parent)


def _function(node: fx.Node) -> str | None:
    """Name of the innermost function outside of torch that the node comes from."""
    frames = re.findall(r'File "(.*)", line \d+, in (\S+)', node.meta.get("stack_trace") or "")
    return next((name for file, name in reversed(frames) if not file.startswith(_TORCH)), None)


# ---------------------------------------------------------------------------------------------------- advice


def _advice(launches: list[Launch]) -> Iterable[str]:
    """Norms and rotations that were computed in front of or behind our templates, though these can do them."""
    computed_in: dict[fx.Node, set[int]] = {}
    for i, launch in enumerate(launches):
        for node in launch.nodes:
            computed_in.setdefault(node, set()).add(i)
    calls = [(i, launch.main) for i, launch in enumerate(launches) if launch.main and _is_ours(launch.main)]

    def elsewhere(nodes: Iterable[fx.Node], own: int) -> str:
        """The launches that compute `nodes`, in words; '' where there is none or the op's own one does too."""
        found = sorted({min(computed_in[n]) for n in nodes if n in computed_in and own not in computed_in[n]})
        return f"kernel{'s' * (len(found) > 1)} {' and '.join(map(str, found))}" if found else ""

    used: set[fx.Node] = set()
    for i, call in calls:
        op = _op_name(call).removeprefix("swa_inductor.")
        if op not in _NORMS:
            continue
        name, norm = _NORMS[op]
        value = _argument(call, name)
        before = _back(value)
        norms = [node for node in before if _is_norm(node, value)]
        used.update(norms)
        if where := elsewhere(norms, i):
            yield f"norm of {name} in {where}: pass {norm}_eps (and {norm}_weight) to {op}"
        if where := elsewhere(filter(_is_rotation, before), i):
            yield f"RoPE of {name} in {where}: pass rope (a table) to {op}"
        if name == "q" and (where := elsewhere(filter(_is_rotation, _forward(call)), i)):
            yield f"RoPE of the output in {where}: pass rope and inverse_rope=True to {op}"
    for i, call in calls:
        if _op_name(call) == "swa_inductor.store":
            source = _gemms_behind(_argument(call, "k"))
            rest = [n for n in computed_in if n not in used and _is_norm(n) and source & _gemms_behind(n)]
            if where := elsewhere(rest, i):
                yield f"norm of what the projection of k gives beside k in {where}: use norm_store instead of store"


_NORMS = {
    **dict.fromkeys(("attention", "attention_prefill"), ("q", "q_norm")),
    **dict.fromkeys(("store", "store_cast_back", "norm_store"), ("k", "norm")),
}
"""The argument that an op can normalise and rotate itself, and what its options are named after."""


def _argument(call: fx.Node, name: str) -> fx.Node:
    names = [argument.name for argument in _schema(call).arguments]
    value = call.kwargs[name] if name in call.kwargs else call.args[names.index(name)]
    assert isinstance(value, fx.Node)
    return value


def _is_source(node: fx.Node) -> bool:
    """Where the plain code around an op begins and ends."""
    return node.op != "call_function" or _is_gemm(node) or _is_ours(node)


def _back(value: fx.Node) -> set[fx.Node]:
    """The plain code that computes a value."""
    return _reach(value, lambda node: node.all_input_nodes)


def _forward(call: fx.Node) -> set[fx.Node]:
    """The plain code that reads the output of a call."""
    return set().union(*(_reach(user, lambda node: node.users) for user in call.users))


def _reach(start: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, pending = set[fx.Node](), [start]
    while pending:
        node = pending.pop()
        if node not in found and not _is_source(node):
            found.add(node)
            pending.extend(step(node))
    return found


def _gemms_behind(value: fx.Node) -> set[fx.Node]:
    code = _back(value) | {value}
    return {source for node in code for source in (node, *node.all_input_nodes) if _is_gemm(source)}


def _is_norm(node: fx.Node, value: fx.Node | None = None) -> bool:
    """Whether a node is 1 / sqrt of a mean over the last dim of something, as long as that of `value`."""
    if not _is(node, "rsqrt"):
        return False
    means = [n for n in _back(node) if _is(n, "mean", "sum", "var_mean")]
    return any(value is None or _width(mean.all_input_nodes[0]) == _width(value) for mean in means)


def _width(node: fx.Node) -> int:
    return node.meta["val"].shape[-1]


def _is_rotation(node: fx.Node) -> bool:
    """Whether a node is a * cos +- b * sin, with a and b from one vector."""
    terms = [n for n in node.args if isinstance(n, fx.Node) and _is(n, "mul")]
    if not _is(node, "add", "sub") or len(terms) != 2:
        return False
    factors = [[f for f in term.args if isinstance(f, fx.Node)] for term in terms]
    if any(len(pair) != 2 for pair in factors):
        return False
    (a, c), (b, s) = factors
    return any(_sources(x) & _sources(y) for x in (a, c) for y in (b, s)) and all(
        not (_sources(x) & _sources(y)) for x, y in ((a, c), (b, s))
    )


def _sources(node: fx.Node) -> set[fx.Node]:
    code = _back(node) | {node}
    return {n for m in code for n in (m, *m.all_input_nodes) if _is_source(n)}


def _is(node: fx.Node, *names: str) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in names
