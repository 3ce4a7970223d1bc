"""Tensors as bytes: whole storages, and views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Storages:
    """A growing list of storages; tensors that share a storage are views of one entry.

    Args:
        storages: the entries to begin with.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage] = ()) -> None:
        self._storages = list(storages)
        self._index = {storage._cdata: index for index, storage in enumerate(self._storages)}

    def __len__(self) -> int:
        return len(self._storages)

    def describe(self, value: Any) -> Any:
        """A tensor as a dict of index, dtype, size, stride and offset (in elements); any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in self._index:
            self._index[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return {
            "storage": self._index[storage._cdata],
            "dtype": value.dtype,
            "size": tuple(value.size()),
            "stride": tuple(value.stride()),
            "offset": value.storage_offset(),
        }

    def restore(self, description: Any) -> Any:
        """The value that was described."""
        if not isinstance(description, dict):
            return description
        tensor = torch.empty(0, dtype=description["dtype"])
        return tensor.set_(
            self._storages[description["storage"]], description["offset"], description["size"], description["stride"]
        )

    def bytes_of(self, index: int) -> torch.Tensor:
        """All bytes of one entry, as a uint8 tensor that shares its memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self._storages[index])

    def append(self, data: torch.Tensor) -> None:
        """Adds the storage of a tensor."""
        storage = data.untyped_storage()
        self._index[storage._cdata] = len(self._storages)
        self._storages.append(storage)
