"""Executes the Triton code generated for a GPU on CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._fake_inputs import BASE
from ._tensors import Storages
from ._worker import Worker
from .generated_code import GeneratedCode

_worker = Worker("swa_inductor.testing._interpreter_worker", {"TRITON_INTERPRET": "1"})


def run_on_cpu(
    code: GeneratedCode | str,
    args: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    module: torch.nn.Module | None = None,
) -> tuple[Any, ...]:
    """Runs the very source that was generated for a GPU on CPU tensors, in Triton's interpreter.

    The interpreter's conversions and low-precision arithmetic are repaired to round as the GPU does. It runs in a
    process of its own, so the Triton of this process is left alone. Programs of a grid run one after the other: races
    do not show. Buffers that the code allocates start as bytes 0xFF, NaN in every float format, so that reading them
    before they are written shows. A kernel that has several configurations runs with the first.

    Args:
        code: what generate_code returned. If it is only the text, args are the inputs of the graph in its order.
        args: as passed to generate_code, on the CPU: same strides and dtypes, and same sizes but for dimensions that
            were compiled for any size. Tensors that the code mutates change in place; bytes of their storage outside
            the tensor keep their value unless the code writes them.
        kwargs: keyword arguments, as passed to generate_code.
        module: the module that was passed to generate_code, with CPU parameters and buffers.

    Returns:
        The outputs of the graph, flat. Outputs that are views of arguments are views of the caller's tensors. What fn
        returns without computing it (an argument, a constant) is not among them.

    Raises:
        ValueError: args do not match the inputs of the graph, or are not on the CPU; or a kernel is in Gluon.
        WorkerError: the code raised, or wrote just before or after the storage of an argument; the message holds the
            worker's traceback.
    """
    if isinstance(code, str):
        code, values = GeneratedCode(code), list(args)
    else:
        values = [_input(item, args, kwargs or {}, module) for item in code.inputs or ()]
    if "@gluon.jit" in code.source:
        raise ValueError(
            "Triton's interpreter does not run Gluon: set SWA_INDUCTOR_GLUON=0 to have Triton templates alone"
        )
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise ValueError(f"run_on_cpu takes CPU tensors, got one on {value.device}")
    storages = Storages()
    described = [storages.describe(value) for value in values]
    count = len(storages)
    with torch.no_grad():
        answer = _worker.request(
            {
                "source": code.source,
                "args": described,
                "storages": [storages.bytes_of(index) for index in range(count)],
            }
        )
        for index, data in enumerate(answer["storages"]):
            if index >= count:
                storages.append(data)
            elif data is not None:
                storages.bytes_of(index).copy_(data)
    return tuple(storages.restore(output) for output in answer["outputs"])


def _input(item: Any, args: Sequence[Any], kwargs: Mapping[str, Any], module: torch.nn.Module | None) -> Any:
    if item.path is None:
        return item.value
    first, *rest = item.path
    try:
        if first == "":
            if module is None:
                raise ValueError("the code was generated for a module: pass it as module=")
            value: Any = module
        else:
            value = args[first] if isinstance(first, int) else kwargs[first]
        for key in rest:
            if key == BASE:
                value = value._base
                continue
            if isinstance(value, torch.nn.Module):
                value = {**dict(value.named_parameters()), **dict(value.named_buffers())}
            value = value[key]
    except (IndexError, KeyError):
        raise ValueError(f"the graph takes an input from {item.path}, which was not passed") from None
    return value if item.dim is None else value.size(item.dim)
