"""swa_inductor::ring_read_raw: the last entries of a ring of raw values, without quantisation."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, checks_values, reference_inline
from swa_inductor.meta._library import define
from swa_inductor.records import RAW_DTYPES
from swa_inductor.spec import VALUE_BYTES

SCHEMA = (
    "ring_read_raw(Tensor cache, Tensor state_ids, Tensor positions, Tensor? valid_start=None, *, int window, "
    "str kv_format) -> Tensor"
)


def fake(
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    *,
    window: int,
    kv_format: str,
) -> Tensor:
    checks.check_ring_read_raw(cache, state_ids, positions, valid_start, window, kv_format)
    width = cache.shape[3] // VALUE_BYTES[kv_format]
    return cache.new_empty((state_ids.shape[0], window, width), dtype=RAW_DTYPES[kv_format])


def eager(
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    *,
    window: int,
    kv_format: str,
) -> Tensor:
    checks.check_ring_read_raw(cache, state_ids, positions, valid_start, window, kv_format)
    checks_values.check_values(cache, state_ids, positions, valid_start)
    return reference_inline.ring_read_raw(cache, state_ids, positions, valid_start, window, RAW_DTYPES[kv_format])


define(SCHEMA, fake=fake, eager=eager)
