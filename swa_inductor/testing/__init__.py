"""Tests of generated GPU code on machines without a GPU.

generate_code gives the Triton source that torch.compile generates for a compute capability, run_on_cpu executes that
very source on CPU tensors, resource_usage gives the registers, spills and shared memory that ptxas allots its kernels:

    code = generate_code(fn, x, cache, static_inputs=(1,))
    assert code.count("my_op") == 1 and len(code.kernels) == 1
    (out,) = run_on_cpu(code, (x, cache))
    assert all(usage.spills == 0 for usage in resource_usage(fn, x, cache, capability=(8, 0)))

Linux with a C++ compiler and Triton's NVIDIA backend; torch 2.11 to 2.15, any build.
"""

from ._worker import WorkerError
from .codegen import generate_code
from .fake_gpu import CARDS, Card, fake_gpu
from .generated_code import Allocation, GeneratedCode, GraphInput
from .interpreter import run_on_cpu
from .usage import KernelUsage, resource_usage

__all__ = [
    "CARDS",
    "Allocation",
    "Card",
    "GeneratedCode",
    "GraphInput",
    "KernelUsage",
    "WorkerError",
    "fake_gpu",
    "generate_code",
    "resource_usage",
    "run_on_cpu",
]
