"""swa_inductor::store_cast_back: store, and return the vectors as they will be read back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swa_inductor import records
from swa_inductor.meta import _store
from swa_inductor.meta._library import define

SCHEMA = f"store_cast_back({_store.ARGUMENTS}{_store.OPTIONS}) -> (Tensor, Tensor)"


def fake(k: Tensor, v: Tensor | None, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    _store.Write(k, v, *args, **options).check()
    return k.new_empty(k.shape), k.new_empty((0,) if v is None else v.shape)


def eager(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    write = _store.Write(*args, **options)
    k, form = write(), (write.kv_format, write.min_amax)
    back = [k.new_empty(0) if x is None else records.round_trip(x, *form) for x in (k, write.v)]
    return back[0].contiguous(), back[1].contiguous()


define(SCHEMA, fake=fake, eager=eager)
