"""What Inductor launches, which FX nodes each launch computes, and which fusions it refused and why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.wrapper import KernelCallLine, PythonWrapperCodegen
from torch._inductor.scheduler import Scheduler, WhyNoFuse, fusion_log
from torch._inductor.virtualized import V


class Launch(NamedTuple):
    """One call of a kernel.

    Attributes:
        name: of the Triton kernel, or of the function that is called.
        kind: "template" (a Triton kernel from a template), "triton" (one that Inductor wrote) or "extern".
        nodes: what it computes, nodes of the graph that Inductor lowered, in order; what it reads from a buffer that
            another launch has written is not among them.
        main: the node that a template or a library function stands for; None for kernels that Inductor wrote.
    """

    name: str
    kind: str
    nodes: tuple[fx.Node, ...]
    main: fx.Node | None


class Schedule:
    """What one compilation launches.

    Attributes:
        launches: in order.
        refused: producer and consumer, as positions in `launches`, and why Inductor did not fuse them. The consumer
            reads what the producer writes. Of several reasons the last one, which is about the final kernels.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.refused: list[tuple[int, int, str]] = []


class _Reasons(logging.Handler):
    """Keeps the refusals that the fusion log mentions: names of the two nodes, reason."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        why = record.msg
        if isinstance(why, WhyNoFuse):
            self.found.append((why.name1, why.name2, str(why).partition(": ")[2]))


@contextlib.contextmanager
def watch_schedule() -> Iterator[Schedule]:
    """Within the context, what is compiled is added to the schedule."""
    schedule, calls, reasons = Schedule(), dict[Any, list[str]](), _Reasons()
    write, codegen = PythonWrapperCodegen.writeline, Scheduler.codegen

    def writeline(self: Any, line: Any) -> Any:
        if isinstance(line, KernelCallLine):
            calls.setdefault(V.graph.scheduler.current_node, []).append(line.kernel_name)
        return write(self, line)

    def codegen_and_keep(self: Any) -> None:
        codegen(self)
        _read(schedule, self, calls, reasons.found)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(PythonWrapperCodegen, "writeline", writeline))
        stack.enter_context(mock.patch.object(Scheduler, "codegen", codegen_and_keep))
        stack.enter_context(_debug_log(fusion_log, reasons))
        yield schedule


@contextlib.contextmanager
def _debug_log(log: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Debug records of `log` go to `handler`, and to nobody else."""
    before = log.level, log.propagate, log.handlers
    log.level, log.propagate, log.handlers = logging.DEBUG, False, [handler]
    log.manager._clear_cache()  # type: ignore[attr-defined]  # of levels that are enabled
    try:
        yield
    finally:
        log.level, log.propagate, log.handlers = before
        log.manager._clear_cache()  # type: ignore[attr-defined]


def _read(schedule: Schedule, scheduler: Any, calls: dict[Any, list[str]], reasons: list[tuple[str, str, str]]) -> None:
    order = {node: i for i, node in enumerate(V.graph.graph.nodes)}
    position: dict[str, int] = {}  # of the launch that an operation is part of
    for group in scheduler.nodes:
        names, kind = calls.get(group, []), "template" if group.is_template() else "triton"
        if group.is_extern() and not isinstance(group.node, ir.MultiOutput):
            names, kind = [group.node.python_kernel_name or type(group.node).__name__], "extern"
        named = (_node_of(part.node, order) for part in group.get_nodes() if kind == "extern" or part.is_template())
        main = next(named, None)
        for name in names:
            position.update((part.get_name(), len(schedule.launches)) for part in group.get_nodes())
            schedule.launches.append(Launch(name, kind, _computed(scheduler, group, order), main))
    why = {}
    for producer, consumer, reason in reasons:
        a, b = (_group_position(name, position) for name in (producer, consumer))
        if a is not None and b is not None and a != b and _feeds(scheduler, producer, consumer):
            why[a, b] = reason
    schedule.refused += [(a, b, why[a, b]) for a, b in sorted(why)]


def _group_position(name: str, position: dict[str, int]) -> int | None:
    """Launch of a node as the log names it, op1 or op1_op2 for fused ones."""
    return position.get(name.split("_")[0])


def _feeds(scheduler: Any, producer: str, consumer: str) -> bool:
    """Whether one of the operations in `consumer` reads what one of those in `producer` writes."""
    nodes = scheduler.name_to_node
    written = {buffer for name in producer.split("_") for buffer in nodes[name].get_buffer_names()}
    return any(dep.name in written for name in consumer.split("_") for dep in nodes[name].read_writes.reads)


def _computed(scheduler: Any, group: Any, order: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The FX nodes from those that the group's results stand for back to those that it reads from memory.

    The origins that Inductor notes for a buffer are no answer: they hold those of its inputs, wherever computed.
    """
    own = group.get_buffer_names()
    outside = [dep.name for dep in group.read_writes.reads if dep.name not in own and dep.name in scheduler.name_to_buf]
    stops = {_node_of(scheduler.name_to_buf[name].defining_op.node, order) for name in outside}
    found = {node for part in group.get_nodes() if (node := _node_of(part.node, order)) is not None}
    # What reads nothing is a constant that the lowering of a node needs, not its result.
    pending = [node for node in found if node not in stops and group.read_writes.reads]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node.op == "call_function" and node not in found and node not in stops:
                found.add(node)
                pending.append(node)
    return tuple(sorted(found, key=lambda node: order[node]))


def _node_of(operation: Any, order: dict[fx.Node, int]) -> fx.Node | None:
    """The FX node whose lowering made an operation: the last one of its origins."""
    return max((node for node in operation.origins if node in order), key=lambda node: order[node], default=None)
