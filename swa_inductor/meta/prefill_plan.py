"""swa_inductor::prefill_plan: from the lengths of a prefill batch, on the device, to its load plan and pivots."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor import checks, checks_values, reference_inline
from swa_inductor.meta._library import define

SCHEMA = (
    "prefill_plan(Tensor state_ids, Tensor q_lens, Tensor k_lens, Tensor? valid_start=None, *, SymInt num_tokens, "
    "int window, int ring_rows, int num_slots) -> (Tensor segments, Tensor pivots, Tensor token_state_ids, "
    "Tensor token_positions, Tensor token_q_starts, Tensor token_valid_start)"
)


def fake(
    state_ids: Tensor,
    q_lens: Tensor,
    k_lens: Tensor,
    valid_start: Tensor | None = None,
    *,
    num_tokens: int,
    window: int,
    ring_rows: int,
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    checks.check_prefill_plan(state_ids, q_lens, k_lens, valid_start, num_tokens, window, ring_rows, num_slots)
    return (
        state_ids.new_empty((state_ids.shape[0], 3, 4)),
        state_ids.new_empty((num_tokens, 4)),
        state_ids.new_empty(num_tokens),
        state_ids.new_empty(num_tokens, dtype=torch.int64),
        state_ids.new_empty(num_tokens, dtype=torch.int64),
        state_ids.new_empty(num_tokens),
    )


def eager(
    state_ids: Tensor,
    q_lens: Tensor,
    k_lens: Tensor,
    valid_start: Tensor | None = None,
    *,
    num_tokens: int,
    window: int,
    ring_rows: int,
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    checks.check_prefill_plan(state_ids, q_lens, k_lens, valid_start, num_tokens, window, ring_rows, num_slots)
    if checks_values.readable(state_ids):
        starts = None if valid_start is None else valid_start.tolist()
        checks_values.check_sequences(
            num_slots, num_tokens, state_ids.tolist(), q_lens.tolist(), k_lens.tolist(), starts
        )
    token = torch.arange(num_tokens, device=state_ids.device)
    return reference_inline.prefill_plan(token, state_ids, q_lens, k_lens, valid_start, window, ring_rows, num_slots)


define(SCHEMA, fake=fake, eager=eager)
