"""swa_inductor::prepare_decode: the metadata of the next decode step, from what only the device knows.

The overload `out` writes its results into buffers of the caller, and adds to `errors`, which it also reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_inductor import checks, reference_inline
from swa_inductor.meta._library import define

INPUTS = (
    "Tensor lengths, Tensor accepted, Tensor state_ids, Tensor? valid_start=None, Tensor? draft_counts=None, *, "
    "int tokens_per_step, int window, int ring_rows, int num_slots, int? width=None"
)
SCHEMA = (
    f"prepare_decode({INPUTS}) -> (Tensor token_state_ids, Tensor token_positions, Tensor token_valid_start, "
    "Tensor store_rows, Tensor offset_len, Tensor index, Tensor new_lengths, Tensor errors)"
)
OUT_SCHEMA = (
    f"prepare_decode.out({INPUTS}, Tensor(a!) token_state_ids, Tensor(b!) token_positions, "
    "Tensor(c!) token_valid_start, Tensor(d!) store_rows, Tensor(e!) offset_len, Tensor(f!)? index, "
    "Tensor(g!) new_lengths, Tensor(h!) errors) -> ()"
)


def results(sequences: Any, tokens_per_step: int, width: int | None) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    """Shape and dtype of each result, in the order of the schemas; without `width` the index has no element."""
    tokens = sequences * tokens_per_step
    return {
        "token_state_ids": ((tokens,), torch.int32),
        "token_positions": ((tokens,), torch.int64),
        "token_valid_start": ((tokens,), torch.int32),
        "store_rows": ((tokens,), torch.int32),
        "offset_len": ((tokens, 2), torch.int32),
        "index": ((0,) if width is None else (tokens, width), torch.int32),
        "new_lengths": ((sequences,), torch.int64),
        "errors": ((1,), torch.int32),
    }


def fake(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    valid_start: Tensor | None = None,
    draft_counts: Tensor | None = None,
    *,
    width: int | None = None,
    **geometry: Any,
) -> tuple[Tensor, ...]:
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    checks.check_prepare_decode(*inputs, width=width, **geometry)
    forms = results(state_ids.shape[0], geometry["tokens_per_step"], width)
    return tuple(state_ids.new_empty(shape, dtype=dtype) for shape, dtype in forms.values())


def eager(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    valid_start: Tensor | None = None,
    draft_counts: Tensor | None = None,
    *,
    width: int | None = None,
    **geometry: Any,
) -> tuple[Tensor, ...]:
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    checks.check_prepare_decode(*inputs, width=width, **geometry)
    *rows, index, new_lengths, errors = reference_inline.prepare_decode(*inputs, width=width, **geometry)
    return *rows, index.new_empty(0) if width is None else index, new_lengths, errors


def fake_out(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    valid_start: Tensor | None = None,
    draft_counts: Tensor | None = None,
    *,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
    **out: Tensor | None,
) -> None:
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    checks.check_prepare_decode(*inputs, tokens_per_step, window, ring_rows, num_slots, width)
    checks.check_out(inputs, out, results(state_ids.shape[0], tokens_per_step, width))


def eager_out(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    valid_start: Tensor | None = None,
    draft_counts: Tensor | None = None,
    *,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
    **out: Any,
) -> None:
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    geometry = (tokens_per_step, window, ring_rows, num_slots, width)
    checks.check_prepare_decode(*inputs, *geometry)
    checks.check_out(inputs, out, results(state_ids.shape[0], tokens_per_step, width))
    values = reference_inline.prepare_decode(*inputs, *geometry)
    for (name, buffer), value in zip(out.items(), values, strict=True):
        if name == "errors":
            buffer += value
        elif buffer is not None:
            buffer.copy_(value)


define(SCHEMA, fake=fake, eager=eager)
define(OUT_SCHEMA, fake=fake_out, eager=eager_out)
