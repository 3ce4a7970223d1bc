"""swa_inductor::store: cast the new K and V vectors to records and write them into the rings, in place."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, reference
from swa_inductor.meta._library import define

SCHEMA = (
    "store(Tensor k, Tensor? v, Tensor(a!) cache, Tensor state_ids, Tensor positions, *, "
    "str kv_format, float min_amax) -> ()"
)


def fake(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, *, kv_format: str, min_amax: float
) -> None:
    checks.check_store(k, v, cache, state_ids, positions, kv_format, min_amax)


def eager(
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    kv_format: str,
    min_amax: float,
) -> None:
    checks.check_store(k, v, cache, state_ids, positions, kv_format, min_amax)
    checks.check_values(cache, state_ids, positions)
    reference.store(k, v, cache, state_ids, positions, kv_format, min_amax)


define(SCHEMA, fake=fake, eager=eager)
