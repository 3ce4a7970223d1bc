"""Hosts Gluon kernels in Inductor templates: what compiles them, and the names that their generated source imports.

A TritonTemplate writes the source, but for the decorator of the kernel. What Inductor adds behind the kernel (index
arithmetic, a fused epilogue) finds its `tl` and `triton_helpers` here: Gluon wants layouts where Triton does not. The
kernel has to give all indices a layout; then what follows has one too.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language.core import _unwrap_if_constexpr, _unwrap_shape, builtin

from swa_inductor.lowerings import _inductor

IMPORTS = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from swa_inductor.lowerings import _sm90 as sm90
from swa_inductor.lowerings._gluon import tl, triton_helpers, triton_heuristics
"""


class _Kernel(_inductor.TritonTemplateKernel):
    @classmethod
    def gen_common_triton_imports(cls) -> str:  # type: ignore[override]
        return str(super().gen_common_triton_imports()) + IMPORTS

    def jit_lines(self) -> str:
        return str(super().jit_lines()).replace("@triton.jit", "@gluon.jit")


class Template(_inductor.TritonTemplate):
    kernel_type = _Kernel


def template(name: str, grid: Callable[..., Any], source: str) -> Any:
    """As _inductor.triton_template, for a kernel in Gluon."""
    return _inductor.triton_template(name, grid, source, Template)


class _Autotuner(_inductor.triton_heuristics.CachingAutotuner):  # type: ignore[misc]
    def _precompile_config(self, *args: Any, **kwargs: Any) -> Any:
        # Upstream's own code; only the front end that it hands the kernel to is Gluon's.
        upstream = _inductor.triton_heuristics.CachingAutotuner._precompile_config
        names = {**upstream.__globals__, "ASTSource": GluonASTSource}
        twin = types.FunctionType(
            upstream.__code__, names, upstream.__name__, upstream.__defaults__, upstream.__closure__
        )
        twin.__kwdefaults__ = upstream.__kwdefaults__
        return twin(self, *args, **kwargs)


def _template(num_stages: int, num_warps: int, triton_meta: Any, filename: Any = None, **kwargs: Any) -> Any:
    """As triton_heuristics.template."""
    return _inductor.triton_heuristics.cached_autotune(
        None,
        [triton.Config({}, num_stages=num_stages, num_warps=num_warps)],
        triton_meta=triton_meta,
        inductor_meta=kwargs.get("inductor_meta"),
        heuristic_type=_inductor.HeuristicType.TEMPLATE,
        filename=filename,
        caching_autotuner_cls=_Autotuner,
    )


@builtin  # type: ignore[untyped-decorator]
def _full(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
    shape = [_unwrap_if_constexpr(s) for s in _unwrap_shape(shape)]
    # Inductor writes a constant as a tensor of ones dims; Gluon does not promote ranks: a scalar fits every layout.
    shape = [] if all(s == 1 for s in shape) else shape
    return _semantic.full(shape, _unwrap_if_constexpr(value), _unwrap_if_constexpr(dtype), None)


@builtin  # type: ignore[untyped-decorator]
def _arange(start: Any, end: Any, _semantic: Any = None) -> Any:
    return _semantic.arange(_unwrap_if_constexpr(start), _unwrap_if_constexpr(end), None)


@builtin  # type: ignore[untyped-decorator]
def _broadcast_to(input: Any, *shape: Any, _semantic: Any = None) -> Any:
    if not input.type.is_block():
        return input
    sizes = _unwrap_shape(
        shape[0] if len(shape) == 1 and hasattr(_unwrap_if_constexpr(shape[0]), "__iter__") else shape
    )
    return _semantic.broadcast_impl_shape(input, [_unwrap_if_constexpr(s) for s in sizes])


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return triton.language.maximum(a, b, triton.language.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return triton.language.minimum(a, b, triton.language.PropagateNan.ALL)


def _but(module: types.ModuleType, **changed: Any) -> types.ModuleType:
    """A module with the names of another, some of them changed."""
    twin = types.ModuleType(module.__name__)
    vars(twin).update({name: value for name, value in vars(module).items() if not name.startswith("__")}, **changed)
    return twin


tl = _but(triton.language, full=_full, arange=_arange, broadcast_to=_broadcast_to)
triton_helpers = _but(_inductor.runtime_helpers, maximum=_maximum, minimum=_minimum)
triton_heuristics = _but(_inductor.triton_heuristics, template=_template)
