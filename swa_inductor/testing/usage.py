"""Registers, spills and shared memory of generated kernels, from ptxas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ._worker import Worker
from .codegen import generate_code

# Triton decides at import whether it compiles or interprets: the environment of this process may not decide it here.
_worker = Worker("swa_inductor.testing._ptxas_worker", {"TRITON_INTERPRET": None})


@dataclasses.dataclass(frozen=True)
class KernelUsage:
    """What one configuration of one Triton kernel takes.

    Attributes:
        name: the kernel, as in GeneratedCode.kernels.
        num_warps: warps of 32 threads per block.
        num_stages: software pipelining depth.
        registers: 32-bit registers per thread.
        spills: local memory per thread in 32-bit words, which is what Triton calls n_spills; 0 is no spilling.
        shared_bytes: shared memory per block in bytes.
    """

    name: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared_bytes: int


def resource_usage(
    fn: Callable[..., Any], *args: Any, capability: tuple[int, int] = (9, 0), **options: Any
) -> list[KernelUsage]:
    """Compiles every configuration of every Triton kernel of `fn` down to machine code, which takes no GPU.

    Args:
        fn, args, capability: as for generate_code.
        options: the other keyword arguments of generate_code.

    Returns:
        One entry per configuration, kernels in order of definition.

    Raises:
        WorkerError: Triton or ptxas refuses a kernel, or a kernel takes more shared memory than a block may have.
        Exception: as generate_code.
    """
    code = generate_code(fn, *args, capability=capability, **options)
    kernels = [(name, code.kernel_source(name)) for name in code.kernels]
    answer = _worker.request({"kernels": kernels, "capability": tuple(capability)})
    return [KernelUsage(**usage) for usage in answer["usage"]]
