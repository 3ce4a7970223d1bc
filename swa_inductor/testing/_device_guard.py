"""Builds and installs the CUDA device guard that tracing with fake CUDA tensors needs on a machine without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

_SOURCE = Path(__file__).with_name("noop_guard.cpp")


@contextlib.contextmanager
def noop_device_guard() -> Iterator[None]:
    """Within the context, entering or leaving a CUDA device does nothing.

    Raises:
        RuntimeError: the guard library cannot be built (no C++ compiler, or it fails).
    """
    library = _library()
    library.noop_guard_install()
    try:
        yield
    finally:
        library.noop_guard_remove()


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_build()))


def _build() -> Path:
    root = Path(torch.__file__).parent
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    # c10 is already in the process; naming it with its run path lets the loader resolve the registry.
    link = [f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    key = hashlib.sha256("\0".join([torch.__version__, _SOURCE.read_text(), *flags, *link]).encode()).hexdigest()[:16]
    target = Path(cache_dir()) / "swa_inductor" / f"noop_guard_{torch.__version__}_{key}.so"
    if target.exists():
        return target
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "swa_inductor.testing needs a C++ compiler to trace for a GPU that is not there: "
            "install g++ (Debian and Ubuntu: apt-get install g++) or name one in $CXX"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [compiler, *flags, str(_SOURCE), "-o", temporary, *link]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        os.unlink(temporary)
        raise RuntimeError(f"building {_SOURCE.name} failed: {' '.join(command)}\n{result.stderr}")
    os.replace(temporary, target)  # atomic: processes may build it at the same time
    return target
