"""The three ways to run a function of the package: eager, compiled C++, the generated sm_90 source on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swa_inductor.testing import generate_code, run_on_cpu


class Runs:
    """Runs a function over tensors whose dim 0, unless it is 1, varies from call to call; each way compiles once.

    Every argument is a tensor or None, and the function returns tensors.
    """

    def __init__(self, fn: Callable[..., Any], *example: Tensor | None) -> None:
        self.fn, self.example = fn, example

    def eager(self, *args: Tensor | None) -> tuple[Tensor, ...]:
        return _flat(self.fn(*args))

    @cache  # noqa: B019  lives as long as the test module
    def _cpp(self) -> Callable[..., Any]:
        return torch.compile(self.fn, fullgraph=True)

    def cpp(self, *args: Tensor | None) -> tuple[Tensor, ...]:
        for a in args:
            if a is not None:
                torch._dynamo.maybe_mark_dynamic(a, 0)
        return _flat(self._cpp()(*args))

    @cache  # noqa: B019
    def code(self) -> Any:
        dynamic = [i for i, a in enumerate(self.example) if a is not None and len(a) != 1]
        return generate_code(self.fn, *self.example, dynamic_inputs=dynamic)

    def sm_90(self, *args: Tensor | None) -> tuple[Tensor, ...]:
        return run_on_cpu(self.code(), args)

    def __call__(self, how: str, *args: Tensor | None) -> tuple[Tensor, ...]:
        return getattr(self, how)(*args)


def _flat(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


HOW = ("eager", "cpp", "sm_90")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
