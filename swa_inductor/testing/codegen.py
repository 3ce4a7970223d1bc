"""Gets the Triton code that torch.compile generates for a GPU, on a machine without one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering

from ._fake_inputs import FakeInputs
from .fake_gpu import fake_gpu
from .generated_code import GeneratedCode, GraphInput

# Caches would hide what is under test; everything that measures needs a GPU. Names that this torch lacks are left out.
_CONFIG = {
    "force_disable_caches": True,
    "compile_threads": 1,
    "shape_padding": False,
    "use_static_triton_launcher": False,
    "benchmark_epilogue_fusion": False,
    "max_autotune_report_choices_stats": False,
}


class _Captured(BaseException):
    """The generated source; not an Exception, so that the layers of the compiler leave it alone."""


class _Called(BaseException):
    """The compiled graph was called; ends the run."""


class _Capture:
    """Stands between AOTAutograd and Inductor: keeps the source of each graph, and what the graph is called with."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.placeholders: list[torch.fx.Node] = []
        self.arguments: list[Any] = []

    def compile(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        self.placeholders = graph.graph.find_nodes(op="placeholder")

        def keep(source: str) -> None:
            raise _Captured(source)

        try:
            with mock.patch.object(GraphLowering, "save_output_code", keep):
                compile_fx.compile_fx_inner(graph, example_inputs, **kwargs)
        except _Captured as captured:
            self.sources.append(captured.args[0])
        else:
            raise RuntimeError("Inductor compiled the graph without generating source (no operators in it?)")

        def call(arguments: list[Any]) -> Any:
            self.arguments = list(arguments)
            raise _Called

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def generate_code(
    fn: Callable[..., Any],
    *args: Any,
    capability: tuple[int, int] = (9, 0),
    static_inputs: Sequence[int] = (),
    dynamic_inputs: Sequence[int] = (),
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> GeneratedCode:
    """Compiles `fn` with torch.compile for a GPU that need not be there, and returns the generated code; runs nothing.

    Compilation is for inference (no_grad). Dynamo is reset before and after: functions that the process had compiled
    compile again when called next. Where autotuning would measure, the first choice wins. Not supported: cpp_wrapper,
    and torch.tensor(..., device="cuda") inside fn, which needs the device even for a fake.

    Args:
        fn: a function, or a module: its parameters and buffers are inputs of the graph too.
        args: what fn is to be called with. Of a tensor on any device only size, stride, dtype, storage offset and the
            buffer that it is a view of matter, never its values: fn sees a fake CUDA tensor in its place.
        capability: compute capability (major, minor), one of fake_gpu.CARDS.
        static_inputs: positions in args of tensors that keep their address from call to call, like caches.
        dynamic_inputs: positions in args of tensors whose dimension 0 is compiled for any size.
        mode: of torch.compile.
        options: of torch.compile.
        fullgraph: of torch.compile.
        kwargs: keyword arguments of fn.

    Returns:
        The code of the only graph.

    Raises:
        ValueError: unknown capability, cpp_wrapper, or fn does not compile to exactly one graph.
        RuntimeError: no C++ compiler on a machine without a GPU.
        Exception: whatever tracing or lowering raises, as torch.compile wraps it.
    """
    if (options or {}).get("cpp_wrapper", inductor_config.cpp_wrapper):
        raise ValueError("generate_code reads the Python wrapper: turn cpp_wrapper off")
    kwargs = dict(kwargs or {})
    capture = _Capture()
    real_compile_fx = compile_fx.compile_fx

    def compile_with_capture(*compile_args: Any, **compile_kwargs: Any) -> Any:
        compile_kwargs.setdefault("inner_compile", capture.compile)
        return real_compile_fx(*compile_args, **compile_kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu(capability))
        config = {name: value for name, value in _CONFIG.items() if name in inductor_config._config}  # type: ignore[attr-defined]
        stack.enter_context(inductor_config.patch(config))
        stack.enter_context(mock.patch.object(compile_fx, "compile_fx", compile_with_capture))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*force_disable_caches")
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        fakes = FakeInputs()
        fake_fn = fakes.module(fn) if isinstance(fn, torch.nn.Module) else fn
        fake_args = [fakes.value(arg, (position,)) for position, arg in enumerate(args)]
        fake_kwargs = {name: fakes.value(arg, (name,)) for name, arg in kwargs.items()}
        for position in static_inputs:
            torch._dynamo.mark_static_address(fake_args[position])
        for position in dynamic_inputs:
            torch._dynamo.mark_dynamic(fake_args[position], 0)
        stack.enter_context(fakes.mode)
        stack.enter_context(torch.no_grad())
        if not fullgraph:
            _check_one_graph(fake_fn, fake_args, fake_kwargs)
        compiled = torch.compile(fake_fn, fullgraph=fullgraph, mode=mode, options=dict(options) if options else None)
        with contextlib.suppress(_Called):
            compiled(*fake_args, **fake_kwargs)
        if len(capture.sources) != 1:
            raise ValueError(f"fn compiled to {len(capture.sources)} graphs where exactly one is wanted")
        return GeneratedCode(capture.sources[0], (capability[0], capability[1]), _graph_inputs(capture, fakes))


def _check_one_graph(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The run that captures ends with the first graph: count them in a run of their own."""
    graphs = []

    def count(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile(fn, backend=count)(*args, **kwargs)
    torch._dynamo.reset()
    if len(graphs) != 1:
        raise ValueError(f"fn compiled to {len(graphs)} graphs where exactly one is wanted")


def _graph_inputs(capture: _Capture, fakes: FakeInputs) -> tuple[GraphInput, ...]:
    """Tells by identity which argument each tensor input is, and by symbol which size each integer input is."""
    sizes: dict[str, GraphInput] = {}
    for node, argument in zip(capture.placeholders, capture.arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            for dim, size in enumerate(node.meta["val"].size()):
                sizes.setdefault(str(size), GraphInput(fakes.path(argument), dim))
    inputs = []
    for node, argument in zip(capture.placeholders, capture.arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            inputs.append(GraphInput(fakes.path(argument)))
        else:
            inputs.append(sizes.get(str(node.meta["val"]), GraphInput(None, value=argument)))
    return tuple(inputs)
