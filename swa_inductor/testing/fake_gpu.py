"""Makes this process believe, for a while, that it has one CUDA GPU of a given compute capability."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._subclasses.fake_tensor as fake_tensor
from torch._inductor import codecache
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import AlgorithmSelectorCache

from ._cuda_on_cpu import CudaOnCpu
from ._device_guard import noop_device_guard


@dataclasses.dataclass(frozen=True)
class Card:
    """What the compiler asks a GPU about.

    Attributes:
        name: marketing name, as torch.cuda.get_device_name gives it.
        multi_processors: number of streaming multiprocessors.
        threads_per_multi_processor: most resident threads of one multiprocessor.
        shared_bytes: most shared memory that one block may opt in to.
        memory_bytes: device memory.
    """

    name: str
    multi_processors: int
    threads_per_multi_processor: int
    shared_bytes: int
    memory_bytes: int


CARDS: dict[tuple[int, int], Card] = {
    (8, 0): Card("NVIDIA A100-SXM4-80GB", 108, 2048, 166912, 80 << 30),
    (8, 6): Card("NVIDIA A10", 72, 1536, 101376, 24 << 30),
    (8, 9): Card("NVIDIA L40S", 142, 1536, 101376, 48 << 30),
    (9, 0): Card("NVIDIA H200", 132, 2048, 232448, 141 << 30),
    (10, 0): Card("NVIDIA B200", 148, 2048, 232448, 180 << 30),
    (12, 0): Card("NVIDIA GeForce RTX 5090", 170, 1536, 101376, 32 << 30),
}


def card_of(capability: tuple[int, int]) -> Card:
    """The card that stands for a compute capability.

    Raises:
        ValueError: no card of that capability is described in CARDS.
    """
    try:
        return CARDS[tuple(capability)]  # type: ignore[index]
    except KeyError:
        raise ValueError(f"no card of compute capability {capability}; known: {sorted(CARDS)}") from None


@contextlib.contextmanager
def fake_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Within the context, torch.cuda, Inductor and Triton see one GPU of compute capability `capability`.

    Nothing can run on it: it serves tracing with fake tensors, code generation and ptxas. Everything is restored on
    exit. The state is global to the process, so keep other threads from compiling meanwhile. On a machine that has a
    GPU, the real one is hidden, not used.

    Raises:
        ValueError: unknown capability.
        RuntimeError: no C++ compiler where one is needed (see _device_guard).
    """
    card = card_of(capability)
    real_gpu = torch.cuda.is_available()
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, **attributes: Any) -> None:
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

        if not real_gpu:
            stack.enter_context(noop_device_guard())
        # Inductor traces the patterns of this pass on tensors of the device in use; they serve any device.
        init_patterns = joint_graph.lazy_init
        patch(joint_graph, lazy_init=lambda device=None: init_patterns(torch.device("cpu")))
        folder = joint_graph.UniformValueConstantFolder
        patch(folder, **{name: _on_cpu(getattr(folder, name)) for name in ("run", "_add_peephole_patterns")})
        properties = _properties(card, capability)
        patch(torch.cuda, **_torch_cuda(properties, capability))
        patch(
            torch._C,
            _cuda_isCurrentStreamCapturing=lambda: False,
            _cuda_getCurrentRawStream=lambda device=0: 0,
            _cuda_cudaCachingAllocator_is_enabled=lambda: True,
        )
        patch(fake_tensor, init_gpu_context=lambda device: None)
        device_interface.init_device_reg()
        interface = _interface(properties, capability)
        stack.enter_context(
            mock.patch.dict(device_interface.device_interfaces, {"cuda": interface, "cuda:0": interface})  # type: ignore[dict-item]
        )
        # There is nothing to time on: autotuning keeps every choice and takes the first.
        patch(AlgorithmSelectorCache, make_benchmark_fn=_make_benchmark_fn, make_precompile_fn=_make_precompile_fn)
        patch(AlgorithmSelectorCache, log_results=lambda *args, **kwargs: None)
        stack.enter_context(_triton_driver(properties, capability))
        _forget_devices()
        stack.callback(_forget_devices)
        yield


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """Constant folding calculates with real tensors on the device of the graph: the CPU gives the same."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with CudaOnCpu():
            return method(*args, **kwargs)

    return wrapped


def _forget_devices() -> None:
    """Empties the caches of answers about devices."""
    for name in ("torch.utils._triton", "torch._inductor.utils"):
        for value in list(vars(importlib.import_module(name)).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    DeviceProperties.create.cache_clear()
    codecache.CacheBase.get_system.cache_clear()


def _properties(card: Card, capability: tuple[int, int]) -> types.SimpleNamespace:
    """The fields of torch.cuda.get_device_properties()."""
    return types.SimpleNamespace(
        name=card.name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=card.multi_processors,
        max_threads_per_multi_processor=card.threads_per_multi_processor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card.shared_bytes,
        shared_memory_per_multiprocessor=card.shared_bytes + 1024,
        total_memory=card.memory_bytes,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="0",
    )


def _torch_cuda(properties: types.SimpleNamespace, capability: tuple[int, int]) -> dict[str, Any]:
    memory = properties.total_memory
    return dict(
        is_available=lambda: True,
        is_initialized=lambda: False,
        _is_compiled=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
        _set_stream_by_id=lambda *args, **kwargs: None,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: tuple(capability),
        get_device_name=lambda device=None: properties.name,
        mem_get_info=lambda device=None: (memory, memory),
        synchronize=lambda device=None: None,
        is_current_stream_capturing=lambda: False,
        is_bf16_supported=lambda including_emulation=True: True,
        is_tf32_supported=lambda: True,
        get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda state, device="cuda": None,
    )


def _interface(properties: types.SimpleNamespace, capability: tuple[int, int]) -> type:
    """The device interface through which Dynamo and Inductor ask about 'cuda'."""

    class Worker:
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    members: dict[str, Any] = dict(
        Worker=Worker,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        exchange_device=lambda device: 0,
        maybe_exchange_device=lambda device: 0,
        synchronize=lambda device=None: None,
        get_raw_stream=lambda device: 0,
        get_device_properties=lambda device=None: properties,
        get_compute_capability=lambda device=None: 10 * capability[0] + capability[1],
        is_bf16_supported=lambda including_emulation=False: True,
        is_triton_capable=lambda device=None: True,
        raise_if_triton_unavailable=lambda device=None: None,
    )
    static = {name: value if name == "Worker" else staticmethod(value) for name, value in members.items()}
    return type("FakeCudaInterface", (device_interface.CudaInterface,), static)


def _make_benchmark_fn(choices: Any, *args: Any, **kwargs: Any) -> Callable[[Any], dict[Any, float]]:
    return lambda candidates: {choice: float(rank + 1) for rank, choice in enumerate(candidates)}


def _make_precompile_fn(self: Any, *args: Any, **kwargs: Any) -> Callable[[], dict[Any, float]]:
    return lambda: {}


@contextlib.contextmanager
def _triton_driver(properties: types.SimpleNamespace, capability: tuple[int, int]) -> Iterator[None]:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    # A subclass, so that Inductor takes the driver in place for the NVIDIA one and keeps it.
    class FakeCudaDriver(CudaDriver):
        def __init__(self) -> None:
            pass  # the real one compiles a helper against libcuda

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return capability

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise RuntimeError("there is no GPU to measure on")

    before = driver._active
    driver.set_active(FakeCudaDriver())
    try:
        yield
    finally:
        driver.set_active(before)
