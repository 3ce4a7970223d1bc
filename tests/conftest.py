"""Shared by all tests: the gpu marker, and the kernel figures printed at the end of the log."""

from __future__ import annotations

import pytest
import torch

KERNEL_FIGURES: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture
def kernel_figures() -> list[str]:
    """Lines to print in the summary of the run."""
    return KERNEL_FIGURES


def pytest_terminal_summary(terminalreporter) -> None:  # noqa: ANN001
    if KERNEL_FIGURES:
        terminalreporter.section("registers, spills and shared memory (ptxas)")
        for line in KERNEL_FIGURES:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
