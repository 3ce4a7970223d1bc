"""The text that Inductor generates for one graph, taken apart."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from typing import NamedTuple

# What Inductor names the ways to allocate a buffer in `call`: empty_strided_cuda, empty_strided_cpu_pinned, ...
_ALLOCATE = re.compile(r"empty_strided_\w+")


class Allocation(NamedTuple):
    """A buffer that `call` allocates.

    Attributes:
        size: one entry per dimension, in elements; an int, or the text of a symbolic expression.
        stride: as size.
        dtype: for example "torch.bfloat16".
    """

    size: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: str


class GraphInput(NamedTuple):
    """Where one input of the graph comes from.

    Attributes:
        path: the argument of the compiled function: (position,) or (keyword,), with keys into it where it is a
            container; ("", name) for a parameter or buffer where fn is a module; None for a plain number.
        dim: for a symbolic size, the dimension of the tensor at `path` that it is; None for the tensor itself.
        value: the number that was seen at compile time where path is None.
    """

    path: tuple[int | str, ...] | None
    dim: int | None = None
    value: int | float | None = None


@dataclasses.dataclass(frozen=True)
class GeneratedCode:
    """What torch.compile generates for one graph: the Python wrapper and the Triton kernels that it embeds.

    Test the names and counts of your own kernels inside `call`, never text elsewhere: the rest of the module changes
    with caching and autotuning options.

    Attributes:
        source: the whole module.
        capability: the compute capability that it was generated for.
        inputs: what the graph takes, in order, in terms of the arguments of the compiled function; None if unknown.
    """

    source: str = dataclasses.field(repr=False)
    capability: tuple[int, int] = (9, 0)
    inputs: tuple[GraphInput, ...] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def _module(self) -> ast.Module:
        return ast.parse(self.source)

    @functools.cached_property
    def _kernel_sources(self) -> dict[str, str]:
        sources = {}
        for node in self._module.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func) == "async_compile.triton"
            ):
                text = node.value.args[1]
                assert isinstance(text, ast.Constant) and isinstance(text.value, str)
                sources[node.targets[0].id] = text.value
        return sources

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the Triton kernels, in the order of their definition."""
        return tuple(self._kernel_sources)

    def kernel_source(self, name: str) -> str:
        """Source of the module that defines one Triton kernel.

        Args:
            name: one of `kernels`.

        Raises:
            KeyError: there is no such kernel.
        """
        try:
            return self._kernel_sources[name]
        except KeyError:
            raise KeyError(f"no kernel {name!r}; there are {list(self.kernels)}") from None

    @functools.cached_property
    def _call_bodies(self) -> list[ast.FunctionDef]:
        """`call`, and the functions that it hands the parts of a partitioned graph to."""
        functions = []
        for node in self._module.body:
            if isinstance(node, ast.FunctionDef) and (node.name == "call" or node.name.startswith("partition_")):
                functions.append(node)
            elif isinstance(node, ast.ClassDef) and node.name == "Runner":
                functions += [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "call"]
        if not any(function.name == "call" for function in functions):
            raise ValueError("the generated module has no Python function named call")
        return functions

    @functools.cached_property
    def call(self) -> str:
        """The body of `call`: allocations, launches, extern calls. The parts of a partitioned graph come first."""
        lines = self.source.splitlines()
        return "\n".join(
            line for function in self._call_bodies for line in lines[function.body[0].lineno - 1 : function.end_lineno]
        )

    @functools.cached_property
    def launches(self) -> tuple[str, ...]:
        """Names of the Triton kernels that `call` launches, in order, with repeats."""
        names = [name.removesuffix(".run") for name, _ in self._calls() if name.endswith(".run")]
        return tuple(name for name in names if name in self._kernel_sources)

    def count(self, name_substring: str) -> int:
        """How many launches in `call` are of Triton kernels whose name contains `name_substring`."""
        return sum(name_substring in name for name in self.launches)

    @functools.cached_property
    def allocations(self) -> list[Allocation]:
        """The buffers that `call` allocates, in order."""

        def shape(node: ast.expr) -> tuple[int | str, ...]:
            assert isinstance(node, ast.Tuple)
            return tuple(
                item.value if isinstance(item, ast.Constant) and isinstance(item.value, int) else ast.unparse(item)
                for item in node.elts
            )

        return [
            Allocation(shape(call.args[0]), shape(call.args[1]), ast.unparse(call.args[2]))
            for name, call in self._calls()
            if _ALLOCATE.fullmatch(name)
        ]

    def _calls(self) -> list[tuple[str, ast.Call]]:
        """Each call expression of the call body with the text of what it calls, in source order."""
        nodes = [node for body in self._call_bodies for node in ast.walk(body) if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        return [(ast.unparse(node.func), node) for node in nodes]
