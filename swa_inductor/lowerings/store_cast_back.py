"""Lowerings of swa_inductor::store_cast_back: the kernel of store with a second output; on the CPU also in C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import records
from swa_inductor.lowerings import _inductor, _records, store
from swa_inductor.lowerings._template import source
from swa_inductor.meta._store import Write

TEMPLATE = _inductor.triton_template("store_cast_back", store.grid, source("store_cast_back"))


def lower_cuda(*args: Any, **options: Any) -> tuple[Any, Any]:
    write = Write(*args, **options)
    k, v, cache = write.k, write.v, write.cache
    v_back = _inductor.empty_buffer([0] if v is None else v.get_size(), k.get_dtype(), k.get_device())
    k_back = store.launch(
        TEMPLATE,
        _inductor.fixed_layout(k.get_device(), k.get_dtype(), k.get_size()),
        write,
        more=_records.constants(cache),
        v_back=None if v is None else v_back,
    )
    return k_back, v_back


def lower_cpu(*args: Any, **options: Any) -> tuple[Any, Any]:
    write = Write(*args, **options)
    k, v = store.write_cpu(write), write.v
    back = partial(records.round_trip, kv_format=write.kv_format, min_amax=write.min_amax)
    none = _inductor.empty_buffer([0], k.get_dtype(), k.get_device())
    return _inductor.inline(back, k), none if v is None else _inductor.inline(back, v)


_inductor.lower(torch.ops.swa_inductor.store_cast_back.default, cuda=lower_cuda, cpu=lower_cpu)
