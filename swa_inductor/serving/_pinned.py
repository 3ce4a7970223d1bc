"""Buffers in pinned host memory, through which step inputs and results pass without the host waiting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HostBuffer:
    """A pair of pinned buffers (plain memory where the device is the CPU) and the event behind their last copy.

    state_ids: int32 [rows], on the way to the device. results: int64 [rows, columns], on the way back.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.state_ids = torch.empty(rows, dtype=torch.int32, pin_memory=pinned)
        self.results = torch.empty(rows, columns, dtype=torch.int64, pin_memory=pinned)
        self.event = torch.cuda.Event() if pinned else None
        self.evict: Callable[[], object] | None = None

    def record(self) -> None:
        """Both copies have been issued, on the current stream."""
        if self.event is not None:
            self.event.record()

    def ready(self) -> bool:
        """Whether the copies are over."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The results, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.results


class HostRing:
    """Host buffers in turn. One is handed out again only when its copies are over and its last user has its results."""

    def __init__(self, count: int, rows: int, columns: int, device: torch.device) -> None:
        self._buffers = [HostBuffer(rows, columns, device) for _ in range(count)]
        self._next = 0

    def take(self, evict: Callable[[], object]) -> HostBuffer:
        """The next buffer, free to be written; `evict` is called before it is taken back, to read its results."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.evict is not None:
            buffer.evict()
        buffer.wait()
        buffer.evict = evict
        return buffer
