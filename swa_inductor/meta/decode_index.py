"""swa_inductor::decode_index: the ring rows that each query of a decode step sees."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, checks_values, reference_inline
from swa_inductor.meta._library import define

SCHEMA = (
    "decode_index(Tensor state_ids, Tensor positions, Tensor? valid_start=None, *, int window, int ring_rows, "
    "int num_slots, int? width=None) -> (Tensor offset_len, Tensor index)"
)


def fake(
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    *,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    checks.check_decode_index(state_ids, positions, valid_start, window, ring_rows, num_slots, width)
    tokens = state_ids.shape[0]
    return state_ids.new_empty((tokens, 2)), state_ids.new_empty((tokens, window if width is None else width))


def eager(
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None = None,
    *,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    checks.check_decode_index(state_ids, positions, valid_start, window, ring_rows, num_slots, width)
    checks_values.check_rows(num_slots, state_ids, positions, valid_start)
    return reference_inline.decode_index(
        state_ids, positions, valid_start, window, ring_rows, num_slots, window if width is None else width
    )


define(SCHEMA, fake=fake, eager=eager)
