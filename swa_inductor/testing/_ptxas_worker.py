"""Worker process of resource_usage: compiles kernels; TRITON_INTERPRET is not set in its environment."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
import triton.backends.nvidia
from torch._inductor.codecache import PyCodeCache

from ._worker import serve
from .fake_gpu import card_of, fake_gpu

_CUOBJDUMP = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    capability = request["capability"]
    usage = []
    with fake_gpu(capability), inductor_config.patch(use_static_triton_launcher=False):
        for name, source in request["kernels"]:
            tuner = getattr(PyCodeCache.load(source), name)
            # precompile() would drop configurations that fail; here they are what the caller wants to hear of.
            for config in tuner.configs:
                usage.append(_usage(name, tuner._precompile_config(config).kernel, capability))
    return {"usage": usage}


def _usage(name: str, kernel: Any, capability: tuple[int, int]) -> dict[str, Any]:
    metadata = kernel.metadata
    limit = card_of(capability).shared_bytes
    if metadata.shared > limit:
        raise RuntimeError(
            f"{name} with {metadata.num_warps} warps and {metadata.num_stages} stages takes {metadata.shared} bytes "
            f"of shared memory; a block may have {limit} on compute capability {capability}"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = _RESOURCES.search(report)
    if match is None:
        raise RuntimeError(f"cuobjdump reports no resources of {name}: {report}")
    registers, stack_bytes = map(int, match.groups())
    return {
        "name": name,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "registers": registers,
        "spills": stack_bytes // 4,
        "shared_bytes": metadata.shared,
    }


def main() -> None:
    serve(_handle)


if __name__ == "__main__":
    main()
