"""Corrects Triton's interpreter where it computes something else than the GPU.

Seen in Triton 3.6 to 3.8: float32 -> bfloat16 truncates, float8 conversions lose carries, ties, saturation and NaN,
other conversions from and to bfloat16 and all arithmetic on it treat its bits as an integer, comparisons keep the type
of what they compare, libdevice returns None, the smaller of NaN and a number is NaN. With numpy >= 2.4, a one-element
array is no index any more. And every call of a function in a kernel patches the whole language again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch._inductor.runtime import triton_helpers
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from ._libdevice import LibDevice

# Element types of which numpy has no arithmetic: the interpreter holds their bits in unsigned integers.
_TORCH = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_NATIVE = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_stock_numpy_type = functools.cache(interpreter._get_np_dtype)
_stock_convert = interpreter._convert_float
_stock_cast = InterpreterBuilder.cast_impl
_stock_binary = InterpreterBuilder.binary_op
_stock_fma = InterpreterBuilder.create_fma
_stock_dot = InterpreterBuilder.create_dot
_stock_all_ones = InterpreterBuilder.get_all_ones_value


def repair_interpreter() -> None:
    """Applies all corrections to this process, for good."""
    interpreter._convert_float = convert_float
    interpreter._get_np_dtype = _numpy_type
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.binary_op = _binary
    InterpreterBuilder.create_fma = _fma
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    InterpreterBuilder.get_bf16 = _bf16_constant
    InterpreterBuilder.get_all_ones_value = _all_ones
    ReduceOps.generic_reduce = _reduce
    ScanOps.generic_scan = _scan
    _repair_index()
    _patch_language_once()
    libdevice = LibDevice()
    triton_helpers.libdevice = libdevice
    for module in (tl.extra, tl.extra.cuda):
        module.libdevice = libdevice
        sys.modules[f"{module.__name__}.libdevice"] = libdevice  # type: ignore[assignment]


def convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """Bits of `data`, of type `source`, as `target`: rounded to nearest even; float8 saturates and keeps NaN."""
    types = {**_TORCH, **_NATIVE}
    if source.name == "bf16" and target.name == "fp32":  # these two, without torch: most of the time goes there
        return _bits(data, np.uint16).astype(np.uint32) << 16
    if source.name == "fp32" and target.name == "bf16" and rounding_mode != ir.ROUNDING_MODE.RTZ:
        bits = _bits(data, np.uint32)
        rounded = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)
    if source.name not in types or target.name not in types or rounding_mode == ir.ROUNDING_MODE.RTZ:
        return _stock_convert(data, source, target, rounding_mode)
    values = _as_torch(data, types[source.name])
    dtype = types[target.name]
    if dtype.itemsize == 1:
        values = values if values.dtype == torch.float64 else values.float()
        limit = torch.finfo(dtype).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    return values.to(dtype).view(_BITS[dtype.itemsize]).numpy().view(f"uint{8 * dtype.itemsize}").reshape(data.shape)


def _numpy_type(dtype: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _stock_numpy_type(dtype.scalar)


def _bits(data: np.ndarray, kind: Any) -> np.ndarray:
    return np.ascontiguousarray(data).view(kind).reshape(data.shape)


def _as_torch(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    bits = np.ascontiguousarray(data).reshape(-1).view(f"int{8 * data.itemsize}" if data.itemsize > 1 else np.uint8)
    return torch.from_numpy(bits.copy()).view(dtype)


def _is_bits(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name in _TORCH


def _values(handle: TensorHandle) -> np.ndarray:
    """What a handle holds, as numbers that numpy can calculate with."""
    if not _is_bits(handle):
        return handle.data
    return convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)


def _handle(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """A handle of element type `dtype` of numbers."""
    if dtype.name not in _TORCH:
        return TensorHandle(np.asarray(values).astype(interpreter._get_np_dtype(dtype), copy=False), dtype)
    values = np.asarray(values)
    source = tl.float64 if values.dtype == np.float64 else tl.float32
    values = values.astype(interpreter._get_np_dtype(source), copy=False)
    return TensorHandle(convert_float(values, source, dtype, None), dtype)


def _cast(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    if not _is_bits(source) and target.scalar.name not in _TORCH:
        return _stock_cast(self, source, target)
    return _handle(_values(source), target.scalar)


def _binary(self: InterpreterBuilder, left: TensorHandle, right: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
    if _is_bits(left):
        result = op(_values(left), _values(right))
    else:
        handle = _stock_binary(self, left, right, op)
        if handle.data.dtype != np.bool_:
            return handle
        result = handle.data
    return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _handle(result, left.dtype.scalar)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    if not _is_bits(z):
        return _stock_fma(self, x, y, z)
    return _handle(_values(x) * _values(y) + _values(z), z.dtype.scalar)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
    """Products of 16- and 8-bit floats are exact in float32, where the GPU accumulates too."""
    if not a.dtype.scalar.is_floating():
        return _stock_dot(self, a, b, d, *precision)
    dtype = np.float64 if a.data.dtype == np.float64 else np.float32
    product = np.matmul(_values(a).astype(dtype, copy=False), _values(b).astype(dtype, copy=False))
    return _handle(product + _values(d).astype(dtype, copy=False), d.dtype.scalar)


def _bf16_constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return _handle(np.array([value], dtype=np.float32), tl.bfloat16)


def _all_ones(self: InterpreterBuilder, dtype: tl.dtype) -> TensorHandle:
    numpy_type = interpreter._get_np_dtype(dtype)
    if numpy_type.kind == "u":  # numpy 2 does not take -1 for an unsigned type
        return TensorHandle(np.full(1, np.iinfo(numpy_type).max, dtype=numpy_type), dtype.scalar)
    return _stock_all_ones(self, dtype)


def _repair_index() -> None:
    stock = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *args: Any) -> None:
        stock(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once() -> None:
    """This process does nothing but interpret."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def _combine(
    self: Any, accumulated: list[np.ndarray], items: list[np.ndarray], dtypes: list[tl.dtype]
) -> list[np.ndarray]:
    """One step of a reduction or scan, on whole slices."""
    operands = [self.to_tensor(data, dtype) for data, dtype in zip(accumulated + items, dtypes * 2, strict=True)]
    result = self.combine_fn.fn(*operands)
    results = result if isinstance(result, tuple | tl.tuple) else (result,)
    shape = accumulated[0].shape
    values = [item.handle.data if isinstance(item, tl.tensor) else item for item in results]
    return [np.broadcast_to(value, shape or (1,)).reshape(shape) for value in values]


def _reduce(self: ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Reduces slice by slice; the stock version goes element by element, a thousand times slower."""
    dtypes = [item.dtype.scalar for item in inputs]
    data = [item.handle.data for item in inputs]
    rank, axis = data[0].ndim, self.axis
    if axis is None:
        data, axis = [item.reshape(-1) for item in data], 0
    accumulated = [np.take(item, 0, axis) for item in data]
    for position in range(1, data[0].shape[axis]):
        items = [np.take(item, position, axis) for item in data]
        accumulated = _combine(self, accumulated, items, dtypes)
    if self.keep_dims:
        axes = tuple(range(rank)) if self.axis is None else axis
        accumulated = [np.expand_dims(item, axes) for item in accumulated]
    return [
        self.to_tensor(item if np.ndim(item) else np.asarray(item).item(), dtype)
        for item, dtype in zip(accumulated, dtypes, strict=True)
    ]


def _scan(self: ScanOps, inputs: list[tl.tensor]) -> list[tl.tensor]:
    dtypes = [item.dtype.scalar for item in inputs]
    data = [np.moveaxis(item.handle.data, self.axis, 0) for item in inputs]
    outputs = [item.copy() for item in data]
    for position in range(1, data[0].shape[0]):
        results = _combine(self, [out[position - 1] for out in outputs], [item[position] for item in data], dtypes)
        for out, result in zip(outputs, results, strict=True):
            out[position] = result
    return [
        self.to_tensor(np.ascontiguousarray(np.moveaxis(out, 0, self.axis)), dtype)
        for out, dtype in zip(outputs, dtypes, strict=True)
    ]
