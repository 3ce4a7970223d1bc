"""Prefill attention in plain torch, a band of keys at a time: for eager mode, where the op gathers W keys per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swa_inductor import records
from swa_inductor.errors import require
from swa_inductor.spec import RingSpec

_SCORES = 1 << 25
"""Attention scores held at a time: 128 MB in fp32."""

_CHUNK = 256
"""Queries at a time at most: more of them waste work on the corners of the band."""


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    valid_start: Tensor | None,
    *,
    spec: RingSpec,
    **options: Any,
) -> Tensor:
    """`prefill_attention` of sequences that are packed into one row of tokens, each in turn. Synchronises.

    q [T, H, D], k [T, H_kv, D], v [T, H_kv, Dv]; the others as `attention_prefill` takes them -> [T, H, Dv], 0 for
    padding. `options`: scale, softcap and sinks.
    """
    slots, counts = torch.unique_consecutive(state_ids, return_counts=True)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    end = 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        row, end = slice(end, end + count), end + count
        if slot < 0:  # padding
            continue
        require(slot < len(ring), "state_ids", slot, f"-1 (padding) to {len(ring) - 1}")
        start = starts[row][:1]
        first = torch.zeros_like(start) if valid_start is None else valid_start[row][:1].long()
        mine_q, mine_k, mine_v = (t[row].transpose(0, 1)[None] for t in (q, k, v))
        out[row] = prefill_attention(
            mine_q,
            mine_k,
            mine_v,
            ring[slot : slot + 1],
            start,
            positions[None, row],
            spec=spec,
            history=min(spec.window - 1, int(start - first)),
            valid_start=first,
            **options,
        )[0]
    return out


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Tensor,
    start: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    history: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    valid_start: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over the history in their rings and themselves, before they are stored.

    New keys and values take part as they will be read back from the ring, so any split of a prompt into chunks gives
    the same result.

    Args:
        q: [B, H, n, D]; k: [B, H_kv, n, D]; v: [B, H_kv, n, Dv].
        ring: uint8 [B, R, H_kv, record_bytes], sequence b in slot b; read only.
        start: int64 [B], tokens of each sequence in its ring.
        positions: int64 [B, n], -1 for padding; the others count up from `start`.
        history: positions before `start` to read, the largest `start` at most, up to window - 1.
        sinks: [H]. valid_start: int64 [B], up to `start`: first position that may be read, default 0.

    Returns:
        [B, n, H, Dv] in the dtype of q, 0 for padding.
    """
    # Real tokens first: then token i of a sequence is at position start + i, and what a query sees is a slice.
    real = positions >= 0
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    batch = torch.arange(order.shape[0], device=order.device)[:, None]
    q, k, v = (x.transpose(1, 2)[batch, order] for x in (q, k, v))
    keys, values = (records.round_trip(x, spec.kv_format, spec.min_amax) for x in (k, v))
    first = torch.zeros_like(start) if valid_start is None else valid_start
    if history:
        past = start[:, None] - history + torch.arange(history, device=start.device)
        stored = ring[batch, past % spec.rows]
        past_k, past_v = records.decode_record(stored, spec.kv_format, spec.head_dim, spec.v_head_dim)
        held = (past >= first[:, None])[:, :, None, None]  # other rows may hold anything, NaN too
        keys = torch.cat([torch.where(held, past_k, 0).to(keys.dtype), keys], 1)
        values = torch.cat([torch.where(held, past_v, 0).to(values.dtype), values], 1)
    out = _band_attention(q, keys, values, first - start + history, spec.window, scale, softcap, sinks)
    rank = (real.cumsum(1) - 1).clamp(min=0)
    return torch.where(real[:, :, None, None], out[batch, rank], 0)


def _band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Each query sees the last `window` keys up to its own, from key `first` on; the queries belong to the last keys.

    q [B, n, H, D]; k [B, N, H_kv, D]; v [B, N, H_kv, Dv]; first int64 [B]; sinks [H] -> [B, n, H, Dv]. fp32 inside.
    """
    batch, n, heads, _ = q.shape
    total, kv_heads = k.shape[1:3]
    out = q.new_empty(batch, n, heads, v.shape[-1])
    chunk = max(1, min(n, _CHUNK, _SCORES // (batch * heads * min(total, window + _CHUNK))))
    for i in range(0, n, chunk):
        end = min(i + chunk, n)
        own = torch.arange(i, end, device=q.device)[:, None] + (total - n)
        low, high = max(0, total - n + i - window + 1), total - n + end
        column = torch.arange(low, high, device=q.device)
        visible = (column <= own) & (column > own - window) & (column >= first[:, None, None])  # [B, n, N]
        # The G query heads of a KV head are rows of one product: [B, H_kv, G * n, D] x [B, H_kv, D, N].
        rows = q[:, i:end].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).float()
        s = rows @ k[:, low:high].permute(0, 2, 3, 1).float() * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s.unflatten(2, (-1, end - i)).masked_fill(~visible[:, None, None], -torch.inf)
        denominator = s.logsumexp(-1, keepdim=True)  # finite: a query sees at least itself
        if sinks is not None:
            denominator = torch.logaddexp(denominator, sinks.float().view(kv_heads, -1, 1, 1))
        p = (s - denominator).exp().flatten(2, 3)
        part = (p @ v[:, low:high].transpose(1, 2).float()).unflatten(2, (-1, end - i))
        out[:, i:end] = part.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out
