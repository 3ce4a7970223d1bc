"""Shared by all tests: the gpu marker, profiles of Hypothesis, the kernel figures printed at the end of the log."""

from __future__ import annotations

import os

# Before torch is imported, here and by the processes that tests start. Threads that spin while they wait take the cores
# from other processes: of the eager tests that was two thirds of the time. And Inductor compiles and loads a trial for
# every instruction set, nine seconds in each process that makes C++: the processor's word will do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The interpreter runs no Gluon; tests marked so switch it on.
os.environ.setdefault("SWA_INDUCTOR_GLUON", "0")

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("ci")  # the same examples every time; `--hypothesis-profile=nightly`: others, and many more

LONGEST = ("test_real_weights", "test_layers_on_two_ranks")
"""A minute each: first, so that no worker of pytest-xdist begins one when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name not in LONGEST)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter) -> None:  # noqa: ANN001
    """Lines that tests recorded as property "kernel"; properties cross the processes of pytest-xdist."""
    reports = [r for group in ("passed", "failed") for r in terminalreporter.getreports(group)]
    lines = [value for r in reports for name, value in r.user_properties if name == "kernel" and r.when == "call"]
    if lines:
        terminalreporter.section("registers, spills and shared memory (ptxas)")
        for line in sorted(lines):
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gluon_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment asks for: the interpreter runs no Gluon, so its kernels have tests of their own."""
    monkeypatch.setattr("swa_inductor.lowerings._template.GLUON", bool(request.node.get_closest_marker("gluon")))
