"""Lowerings of swa_inductor::norm_store: the kernel of store with programs that normalise rows; on the CPU in C++."""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _attend, _inductor, store
from swa_inductor.lowerings._template import next_power_of_2, source
from swa_inductor.meta._store import Write
from swa_inductor.reference_rope import rms_norm


def config(head_dim: int, width: int) -> dict[str, int]:
    """Warps for the vectors of a record, or as many as leave 16 values of a row of x to a thread."""
    records = store.config(head_dim)
    return {**records, "num_warps": min(max(records["num_warps"], next_power_of_2(width) // 512), 16)}


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (cdiv(tokens * kv_heads, meta["BLOCK_M"]) + tokens, 1, 1)


TEMPLATE = _inductor.triton_template("norm_store", grid, source("norm_store"))


def lower_cuda(x: Any, x_weight: Any, *args: Any, x_eps: float, **options: Any) -> Any:
    write = Write(*args, **options)
    width = _inductor.int_of(x.get_size()[1])
    dims = [_inductor.int_of(vector.get_size()[2]) for vector in (write.k, write.v) if vector is not None]
    constants = {
        **config(max(dims), width),
        "N": width,
        "N_BLOCK": next_power_of_2(width),
        "X_EPS": x_eps,
        "X_TYPE": _attend.DOT_TYPES[x.get_dtype()],
        "X_WEIGHT_GIVEN": x_weight is not None,
    }
    normed = _inductor.fixed_layout(x.get_device(), x.get_dtype(), x.get_size())
    return store.launch(TEMPLATE, normed, write, x=x, x_weight=x_weight, more=constants)


def lower_cpu(x: Any, x_weight: Any, *args: Any, x_eps: float, **options: Any) -> Any:
    store.write_cpu(Write(*args, **options))
    return store.rounded(lambda x, weight: rms_norm(x, weight, x_eps), x, x_weight)


_inductor.lower(torch.ops.swa_inductor.norm_store.default, cuda=lower_cuda, cpu=lower_cpu)
