"""Does on the CPU what is asked of a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class CudaOnCpu(TorchDispatchMode):
    """Within the mode, operators that are told to use a CUDA device use the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, _cpu_for_cuda, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu_for_cuda(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device
