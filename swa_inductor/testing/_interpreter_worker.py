"""Worker process of run_on_cpu; TRITON_INTERPRET is set in its environment."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._C._dynamo import guards
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers

from ._cuda_on_cpu import CudaOnCpu
from ._interpreter_repairs import repair_interpreter
from ._tensors import Storages
from ._worker import serve
from .fake_gpu import fake_gpu

# Bytes before and after each argument that must not change; of no pattern, so that arithmetic on them does change them.
_MARGIN = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
_ALIGNMENT = 64


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    return tensor


@contextlib.contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    """What the generated wrapper takes from torch for CUDA does its work on CPU tensors."""
    with (
        fake_gpu((9, 0)),
        mock.patch.object(guards, "_empty_strided_cuda", _empty_strided, create=True),
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        CudaOnCpu(),
    ):
        yield


class _Guarded:
    """A copy of the bytes of a storage between margins."""

    def __init__(self, data: torch.Tensor) -> None:
        room = np.empty(data.numel() + 2 * _MARGIN.size + _ALIGNMENT, dtype=np.uint8)
        start = _MARGIN.size + -(room.ctypes.data + _MARGIN.size) % _ALIGNMENT
        end = start + data.numel()
        self.data = torch.from_numpy(room[start:end])  # its storage is these bytes and no more
        self.data.copy_(data)
        self._margins = room[start - _MARGIN.size : start], room[end : end + _MARGIN.size]
        for margin in self._margins:
            margin[:] = _MARGIN

    def intact(self) -> bool:
        return all(np.array_equal(margin, _MARGIN) for margin in self._margins)


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    guarded = [_Guarded(data) for data in request["storages"]]
    storages = Storages([item.data.untyped_storage() for item in guarded])
    args = [storages.restore(arg) for arg in request["args"]]
    call: Callable[[list[Any]], Any] = PyCodeCache.load(request["source"]).call
    outputs = [storages.describe(output) for output in call(args)]
    for index, item in enumerate(guarded):
        if not item.intact():
            raise RuntimeError(f"the code wrote outside the storage of input(s) {_users(request['args'], index)}")
    changed: list[torch.Tensor | None] = [
        None if torch.equal(item.data, data) else item.data
        for item, data in zip(guarded, request["storages"], strict=True)
    ]
    fresh = [storages.bytes_of(index) for index in range(len(guarded), len(storages))]
    return {"outputs": outputs, "storages": changed + fresh}


def _users(args: list[Any], index: int) -> list[int]:
    return [position for position, arg in enumerate(args) if isinstance(arg, dict) and arg["storage"] == index]


def main() -> None:
    warnings.simplefilter("ignore")  # numpy warns of overflow and NaN, which are ordinary in masked lanes
    with torch.no_grad(), _cuda_is_cpu(), np.errstate(all="ignore"):
        repair_interpreter()
        serve(_handle)


if __name__ == "__main__":
    main()
