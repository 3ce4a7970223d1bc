"""What the commands of the command line share: the device to use, progress bars, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import swa_inductor


class CannotRun(Exception):
    """A command cannot start here; the message says what to do about it."""


def find_device(name: str | None) -> torch.device:
    """The device of that name, default cuda if there is one, on which torch.compile works.

    Raises:
        CannotRun: no such device, or nothing to compile with.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise CannotRun(f"--device {name}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRun("--device cuda: this PyTorch sees no CUDA device")
    find_compiler(device.type)
    return device


def find_compiler(device_type: str) -> str:
    """Path of the compiler that torch.compile needs for devices of that type, the headers of Python being there too.

    Raises:
        CannotRun: one of them is missing.
    """
    # torch.compile builds C++ on the CPU; on CUDA devices Triton builds its launchers with a C compiler.
    if device_type == "cuda":
        compilers, variable = ["gcc", "clang"], "CC"
    else:
        compilers, variable = ["clang++" if sys.platform == "darwin" else "g++"], "CXX"
    compilers = [os.environ[variable]] if os.environ.get(variable) else compilers
    found = next(filter(None, map(shutil.which, compilers)), None)
    if found is None:
        raise CannotRun(
            f"torch.compile needs a compiler and found none ({' or '.join(compilers)}). "
            f"Install g++, e.g. `apt install g++`, or name one in the environment variable {variable}"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise CannotRun("torch.compile needs the headers of Python. Install them, e.g. `apt install python3-dev`")
    return found


@contextmanager
def waiting(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """A progress bar around a piece of work; yields the function that advances it. No total: only the time runs."""
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn()]
    with Progress(*columns, *([MofNCompleteColumn()] if total else []), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, total=total or 1, completed=total or 1)


def versions() -> dict[str, str | None]:
    """Versions of what the figures of a run depend on."""
    found: dict[str, str | None] = {"python": platform.python_version(), "swa-inductor": swa_inductor.__version__}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def device_name(device: torch.device) -> str:
    """What the figures were measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
