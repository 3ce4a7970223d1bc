"""What every op means, in plain torch: the oracle of the tests and the eager implementation.

records.py holds the record formats, reference_inline.py the ops on metadata.
Metadata conventions: a *padded row* has state id -1. A row with bad metadata (state id >= num_slots, negative position,
valid_start > position) counts as padded: it writes nothing and reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from swa_inductor import checks_values, records, reference_inline

# ---------------------------------------------------------------------------------------------------- ring


def live_rows(cache: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
    """bool [T]: rows that are neither padded nor bad."""
    return reference_inline.live_rows(cache.shape[0], state_ids, positions)


def visible_range(
    cache: Tensor, state_ids: Tensor, positions: Tensor, valid_start: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """First visible position `lo` and count `n` of each query, int64 [T]: lo = max(p - W + 1, valid_start, 0)."""
    return reference_inline.visible_range(cache.shape[0], state_ids, positions, valid_start, window)


def writing_rows(cache: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
    """bool [T]: tokens that write their record, one writer per row.

    The tokens of a sequence stand together, in order of position. A token is superseded, and writes nothing, where the
    same call also holds the token R positions later, whose record takes the same row.
    """
    tokens, rows = state_ids.shape[0], cache.shape[1]
    later = (torch.arange(tokens, device=cache.device) + rows).clamp(max=tokens - 1)
    superseded = (state_ids[later] == state_ids) & (positions[later] == positions + rows)
    return live_rows(cache, state_ids, positions) & ~superseded


def store_plan(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, kv_format: str, min_amax: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot [T], row [T], records [T, H_kv, record]) to put in place, without data-dependent shapes; T >= 1.

    A token that writes nothing repeats, byte for byte, the write of a token that does; where none does, every token
    puts back what row 0 of slot 0 holds. So a plain scatter serves, and padded tokens change no byte.
    """
    writes = writing_rows(cache, state_ids, positions)
    tokens = torch.arange(k.shape[0], device=k.device)
    source = torch.where(writes, tokens, writes.int().argmax())
    some = writes.any()
    slot = torch.where(some, state_ids[source].long(), 0)
    row = torch.where(some, positions[source] % cache.shape[1], 0)
    stored = records.encode_record(k, v, kv_format, min_amax)
    return slot, row, torch.where(some, stored[source], cache[0, 0])


def store(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, kv_format: str, min_amax: float
) -> None:
    """Write each token's record into row `position % R` of its slot (api_store.store)."""
    if k.shape[0]:
        slot, row, stored = store_plan(k, v, cache, state_ids, positions, kv_format, min_amax)
        cache.index_put_((slot, row), stored)


# ---------------------------------------------------------------------------------------------------- attention

_CHUNK_VALUES = 1 << 25
"""Gathered K and V values held at a time: bounds the memory of the eager path, 128 MB each in fp32."""

Fetch = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""(tokens of the call, their visible columns bool [T, N]) -> K [T, N, H_kv, D] and V [T, N, H_kv, Dv] of them."""


def _attend_columns(
    q: Tensor,
    visible: Callable[[slice], Tensor],
    width: int,
    fetch: Fetch,
    kv_heads: int,
    v_dim: int,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`attend` over `width` columns per query, a bounded number of queries at a time; all at once where traced."""
    tokens, heads, dim = q.shape

    def attend_part(part: slice) -> tuple[Tensor, Tensor]:
        seen = visible(part)
        k, v = fetch(part, seen)
        return attend(q[part].to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype), seen, sinks, scale, softcap)

    if isinstance(q, FakeTensor):  # its sizes may be symbols, of which no loop can be made
        return attend_part(slice(None))
    out = q.new_empty((tokens, heads, v_dim), dtype=compute_dtype)
    lse = q.new_empty((tokens, heads), dtype=compute_dtype)
    if width == 0:
        return out.zero_(), lse.fill_(-math.inf)
    chunk = max(1, _CHUNK_VALUES // (width * kv_heads * max(dim, v_dim)))
    for t in range(0, tokens, chunk):
        part = slice(t, t + chunk)
        out[part], lse[part] = attend_part(part)
    return out, lse


def _longest(n: Tensor, window: int) -> int:
    """Most visible keys of any query, where that is free to read."""
    return (int(n.max()) if n.numel() else 0) if checks_values.readable(n) else window


def _lone_slot(state_ids: Tensor, slots: int) -> int | None:
    """The slot of all rows of a decode step of one sequence, where that is free to read; else None."""
    if not checks_values.readable(state_ids) or not 1 <= state_ids.numel() <= 16:
        return None
    ids = set(state_ids.tolist())
    slot = ids.pop()
    return slot if not ids and 0 <= slot < slots else None


def attention(
    q: Tensor,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None,
    sinks: Tensor | None,
    window: int,
    scale: float,
    kv_format: str,
    v_head_dim: int | None,
    softcap: float | None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the visible rows of its ring -> out [T, H, Dv], lse [T, H], in `compute_dtype`."""
    dim = q.shape[2]
    lo, n = visible_range(cache, state_ids, positions, valid_start, window)
    lone = _lone_slot(state_ids, cache.shape[0])
    if lone is not None:
        # Row r holds position p - (p - r) % R: the whole ring is read in place, and rows not visible are masked.
        ring = records.decode_record(cache[lone], kv_format, dim, v_head_dim)
        k, v = (x.to(compute_dtype).expand(q.shape[0], *x.shape) for x in ring)
        seen = (positions[:, None] - torch.arange(cache.shape[1])) % cache.shape[1] < n[:, None]
        return attend(q.to(compute_dtype), k, v, seen, sinks, scale, softcap)
    width = _longest(n, window)
    column = torch.arange(width, device=q.device)

    def fetch(part: slice, seen: Tensor) -> tuple[Tensor, Tensor]:
        slot = torch.where(seen, state_ids[part, None].long(), 0)
        row = torch.where(seen, (lo[part, None] + column) % cache.shape[1], 0)
        return records.decode_record(records.take_records(cache, slot, row), kv_format, dim, v_head_dim)

    return _attend_columns(
        q,
        lambda part: column < n[part, None],
        width,
        fetch,
        cache.shape[2],
        dim if v_head_dim is None else v_head_dim,
        sinks,
        scale,
        softcap,
        compute_dtype,
    )


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None,
    sinks: Tensor | None,
    window: int,
    scale: float,
    kv_format: str,
    softcap: float | None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """As `attention`, but keys from position `q_starts[t]` on are new tokens of this call, not yet in the ring."""
    tokens, _, dim = q.shape
    v_dim = None if v is None else v.shape[2]
    lo, n = visible_range(cache, state_ids, positions, valid_start, window)
    width = _longest(n, window)
    column = torch.arange(width, device=q.device)
    own = torch.arange(tokens, device=q.device)

    def fetch(part: slice, seen: Tensor) -> tuple[Tensor, Tensor]:
        key = lo[part, None] + column
        old = seen & (key < q_starts[part, None])
        slot = torch.where(old, state_ids[part, None].long(), 0)
        old_k, old_v = records.decode_record(
            cache[slot, torch.where(old, key % cache.shape[1], 0)], kv_format, dim, v_dim
        )
        # The tokens of a sequence stand together: the one at position `key` is positions[t] - key tokens before.
        new = torch.where(seen & ~old, own[part, None] - (positions[part, None] - key), 0).clamp(0, tokens - 1)
        keep = old[..., None, None]
        new_k = torch.where(keep, old_k.to(k.dtype), k[new])
        return new_k, new_k if v is None else torch.where(keep, old_v.to(v.dtype), v[new])

    return _attend_columns(
        q,
        lambda part: column < n[part, None],
        width,
        fetch,
        cache.shape[2],
        dim if v_dim is None else v_dim,
        sinks,
        scale,
        softcap,
        compute_dtype,
    )


def attention_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    pivots: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    softcap: float | None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention over two row ranges of a workspace per query, (start1, len1, start2, len2) = pivots int32 [T, 4]."""
    start1, len1, start2, len2 = pivots.clamp(min=0).long().unbind(1)
    column = torch.arange(window, device=q.device)
    index = torch.where(column < len1[:, None], start1[:, None], (start2 - len1)[:, None]) + column
    valid = (column < (len1 + len2)[:, None]) & (index < k.shape[0])

    def fetch(part: slice, seen: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.where(seen, index[part], 0)
        return k[rows], (k if v is None else v)[rows]

    return _attend_columns(
        q,
        lambda part: valid[part],
        window,
        fetch,
        k.shape[1],
        (k if v is None else v).shape[2],
        sinks,
        scale,
        softcap,
        compute_dtype,
    )


def attention_index(
    q: Tensor,
    cache: Tensor,
    index: Tensor,
    sinks: Tensor | None,
    scale: float,
    kv_format: str,
    v_head_dim: int | None,
    softcap: float | None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention over the records that int32 index [T, N] names by flat row id, slot * R + row; -1 is absent."""
    slots, rows = cache.shape[:2]
    valid = (index >= 0) & (index < slots * rows)

    def fetch(part: slice, seen: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.where(seen, index[part].long(), 0)
        return records.decode_record(cache[flat // rows, flat % rows], kv_format, q.shape[2], v_head_dim)

    return _attend_columns(
        q,
        lambda part: valid[part],
        index.shape[1],
        fetch,
        cache.shape[2],
        q.shape[2] if v_head_dim is None else v_head_dim,
        sinks,
        scale,
        softcap,
        compute_dtype,
    )


def gather(
    cache: Tensor,
    state_ids: Tensor,
    q_starts: Tensor,
    valid_start: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    window: int,
    kv_format: str,
    head_dim: int,
    v_head_dim: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Workspace of a prefill: W history rows per sequence from q_start - W up, zeros below valid_start; then k, v.

    Returns K [B * W + T, H_kv, D] and V [B * W + T, H_kv, Dv] in `dtype`, one tensor when K = V.
    """
    position = q_starts[:, None] - window + torch.arange(window, device=cache.device)
    start = torch.zeros_like(q_starts) if valid_start is None else valid_start.clamp(min=0).to(q_starts.dtype)
    live = (state_ids >= 0) & (state_ids < cache.shape[0]) & (start <= q_starts)
    present = live[:, None] & (position >= start[:, None])
    slot = torch.where(present, state_ids[:, None].long(), 0)
    stored = cache[slot, torch.where(present, position % cache.shape[1], 0)]
    old_k, old_v = records.decode_record(stored, kv_format, head_dim, v_head_dim)

    def section(old: Tensor, new: Tensor | None) -> Tensor:
        rows = torch.where(present[..., None, None], old.to(dtype), 0).flatten(0, 1)
        return rows if new is None else torch.cat([rows, new.to(dtype)])

    out = section(old_k, k)
    return out, out if v_head_dim is None else section(old_v, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention, every query with keys of its own: the formula of the package.

    q [T, H, D]; k [T, N, H_kv, D]; v [T, N, H_kv, Dv]; visible bool [T, N]; sinks [H]. Keys that are not visible take
    no part whatever they hold, NaN included. A non-finite value in a visible V vector makes that output NaN as a whole.
    Returns out [T, H, Dv] and the natural-log lse [T, H] without the sink term; no visible key: 0 and -inf.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    # [T, H_kv, G, D] x [T, H_kv, D, N]
    s = q.reshape(tokens, kv_heads, heads // kv_heads, dim) @ k.permute(0, 2, 3, 1) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~visible[:, None, None, :], -math.inf)
    # 0 * NaN is NaN: values that no number is leave V. Where V is readable, most calls can be seen to hold none.
    if not checks_values.readable(v) or not v.sum().isfinite():
        finite = v.isfinite()
        broken = visible[:, None, :] & ~finite.all(-1).transpose(1, 2)  # [T, H_kv, N]
        s = s.masked_fill(broken[:, :, None, :], math.nan)
        v = torch.where(finite, v, 0)
    lse = s.logsumexp(-1)
    denominator = lse
    if sinks is not None:
        denominator = torch.logaddexp(lse, sinks.to(s.dtype).view(kv_heads, -1))
    p = torch.exp(s - torch.where(denominator == -math.inf, 0, denominator)[..., None])
    out = p @ v.transpose(1, 2)
    return out.reshape(tokens, heads, -1), lse.reshape(tokens, heads)
