"""numpy in the place of libdevice, which Triton's interpreter cannot call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_lgamma = np.vectorize(math.lgamma, otypes=[np.float64])


def _round_away(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(0.5, x))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "div_rn": np.divide,
    "erf": _erf,
    "erfc": _erfc,
    "exp": np.exp,
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.abs,
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "fast_logf": np.log,
    "floor": np.floor,
    "fma": lambda x, y, z: x * y + z,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "lgamma": _lgamma,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "max": np.fmax,
    "min": np.fmin,
    "nearbyint": np.rint,
    "pow": np.power,
    "rint": np.rint,
    "round": _round_away,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
# Functions whose result has a type of its own: numpy function, Triton type, numpy type.
_TYPED: dict[str, tuple[Callable[..., Any], tl.dtype, type]] = {
    "finitef": (np.isfinite, tl.int1, np.bool_),
    "ilogb": (lambda x: np.frexp(x)[1] - 1, tl.int32, np.int32),
    "isinf": (np.isinf, tl.int1, np.bool_),
    "isnan": (np.isnan, tl.int1, np.bool_),
    "llrint": (np.rint, tl.int64, np.int64),
    "llround": (_round_away, tl.int64, np.int64),
    "signbit": (np.signbit, tl.int1, np.bool_),
}


class LibDevice:
    """Looks like the module triton.language.extra.libdevice; a function that is not here raises NotImplementedError."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _TYPED:
            function, dtype, numpy_type = _TYPED[name]
        elif name in _FUNCTIONS:
            function, dtype, numpy_type = _FUNCTIONS[name], None, None
        else:
            raise NotImplementedError(f"libdevice.{name} has no counterpart for the interpreter")

        def call(*args: Any, _semantic: Any = None) -> tl.tensor:
            like = next(arg for arg in args if isinstance(arg, tl.tensor))
            data = [arg.handle.data if isinstance(arg, tl.tensor) else np.asarray(arg) for arg in args]
            result = np.asarray(function(*data)).astype(numpy_type or like.handle.data.dtype)
            result_type = dtype or like.dtype.scalar
            is_block = any(isinstance(arg, tl.tensor) and arg.type.is_block() for arg in args)
            tensor_type = tl.block_type(result_type, list(result.shape)) if is_block else result_type
            return tl.tensor(TensorHandle(result, result_type), tensor_type)

        return call
