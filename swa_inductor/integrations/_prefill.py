"""Attention of a long chunk of new tokens over ring history and chunk: the op in a trace, else plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_inductor import api, api_store, records
from swa_inductor.banded import packed_attention, prefill_attention
from swa_inductor.integrations._state import NewTokens, RingState, SlotState, may_sync
from swa_inductor.spec import RingSpec


def attend_new(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Tensor,
    state: RingState | SlotState,
    new: NewTokens,
    positions: Tensor,
    *,
    spec: RingSpec,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of new tokens that are not stored yet: storing first would overwrite the history that they see.

    Args and result as in `prefill_attention`; new: the same tokens as rows.
    """
    options: dict[str, Any] = {"spec": spec, "scale": scale, "softcap": softcap, "sinks": sinks}
    if torch.compiler.is_compiling() or (isinstance(state, SlotState) and not may_sync(positions)):
        # One kernel, and one graph for prompts of any length. Eager code of the op gathers W keys for every token.
        kv = kv_rows(k, v, spec)
        if records.RAW_DTYPES.get(spec.kv_format) != k.dtype:
            # As they will be read back. Writes nothing: no token has a slot.
            kv = api_store.store_cast_back(*kv, ring, torch.full_like(new.state_ids, -1), new.positions, spec=spec)
        where = (ring, new.state_ids, new.positions, new.starts)
        rows = api.attention_prefill(token_rows(q), *kv, *where, valid_start=new.valid_start, **options)
        assert isinstance(rows, Tensor)  # no lse was asked for
        return rows.unflatten(0, positions.shape)
    if isinstance(state, SlotState):
        q, k, v = token_rows(q), token_rows(k), token_rows(v)
        where = (ring, new.state_ids, new.positions, new.starts)
        rows = packed_attention(q, k, v, *where, valid_start=new.valid_start, **options)
        return rows.unflatten(0, positions.shape)
    history = spec.window - 1 if state.longest is None else min(spec.window - 1, state.longest)
    return prefill_attention(q, k, v, ring, state.lengths, positions, history=history, **options)


def token_rows(x: Tensor) -> Tensor:
    """[B, H, n, D] -> [B * n, H, D], the tokens of a sequence together."""
    return x.transpose(1, 2).flatten(0, 1)


def kv_rows(k: Tensor, v: Tensor, spec: RingSpec) -> tuple[Tensor, Tensor | None]:
    """`token_rows` of keys and values, as the ops take them: no values where they are the keys."""
    return token_rows(k), None if spec.shared_kv else token_rows(v)
