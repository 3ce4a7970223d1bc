"""Fake CUDA tensors in the place of real arguments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# Key in a path that stands for the tensor of which the one so far is a view.
BASE = "._base"


class FakeInputs:
    """Makes fakes and remembers which argument each stands for.

    A fake has the size, stride, dtype and storage offset of the real tensor and is a view of the fake of its base, so
    that arguments that alias each other still do.

    Attributes:
        mode: the mode that the fakes belong to.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=False)
        self._fakes: dict[int, torch.Tensor] = {}
        self._paths: dict[int, tuple[int | str, ...]] = {}
        self._real: list[torch.Tensor] = []  # keeps the ids in _fakes valid

    def value(self, arg: Any, path: tuple[int | str, ...]) -> Any:
        """The fake of a tensor, module or (nested) list, tuple or dict of tensors; any other value as it is."""
        if isinstance(arg, torch.Tensor):
            fake = self._tensor(arg)
            self._paths.setdefault(id(fake), path)
            if arg._base is not None:  # AOTAutograd passes the base of arguments that alias and are mutated
                self._paths.setdefault(id(self._tensor(arg._base)), (*path, BASE))
            return fake
        if isinstance(arg, torch.nn.Module):
            return self.module(arg, path)
        if isinstance(arg, dict):
            return {key: self.value(item, (*path, key)) for key, item in arg.items()}
        if isinstance(arg, list | tuple):
            items = [self.value(item, (*path, index)) for index, item in enumerate(arg)]
            return type(arg)(*items) if hasattr(arg, "_fields") else type(arg)(items)
        return arg

    def module(self, module: torch.nn.Module, path: tuple[int | str, ...] = ("",)) -> torch.nn.Module:
        """A copy of the module with fakes for its parameters and buffers."""
        memo: dict[int, Any] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            fake = self.value(tensor.detach() if tensor.is_leaf and not tensor._is_view() else tensor, (*path, name))
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                self._paths[id(fake)] = (*path, name)
            memo[id(tensor)] = fake
        with self.mode:
            return copy.deepcopy(module, memo)

    def path(self, fake: Any) -> tuple[int | str, ...] | None:
        """Which argument a fake stands for."""
        return self._paths.get(id(fake))

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._fakes:
            self._real.append(tensor)
            self._fakes[id(tensor)] = self._make(tensor)
        return self._fakes[id(tensor)]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        base = tensor._base
        with self.mode, torch.no_grad():
            if base is not None:
                fake_base = self._tensor(base)
                if base.dtype != tensor.dtype:
                    fake_base = fake_base.view(tensor.dtype)
                return torch.as_strided(fake_base, size, stride, offset)
            if offset:
                reach = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                return torch.empty(reach, dtype=tensor.dtype, device="cuda").as_strided(size, stride, offset)
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cuda")
