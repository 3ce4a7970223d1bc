"""swa_inductor::store_cast_back: store, and return the vectors as they will be read back."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, records, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "store_cast_back(Tensor k, Tensor? v, Tensor(a!) cache, Tensor state_ids, Tensor positions, *, "
    "str kv_format, float min_amax) -> (Tensor, Tensor)"
)


def fake(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, *, kv_format: str, min_amax: float
) -> tuple[Tensor, Tensor]:
    checks.check_store(k, v, cache, state_ids, positions, kv_format, min_amax)
    return k.new_empty(k.shape), k.new_empty((0,) if v is None else v.shape)


def eager(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, *, kv_format: str, min_amax: float
) -> tuple[Tensor, Tensor]:
    checks.check_store(k, v, cache, state_ids, positions, kv_format, min_amax)
    checks.check_values(cache, state_ids, positions)
    reference.store(k, v, cache, state_ids, positions, kv_format, min_amax)
    back = [k.new_empty(0) if x is None else records.round_trip(x, kv_format, min_amax) for x in (k, v)]
    return back[0].contiguous(), back[1].contiguous()


define(SCHEMA, fake=fake, eager=eager)
