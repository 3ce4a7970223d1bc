"""What the ops on metadata mean, in plain torch: compiled code without a template traces these very functions.

They are the part of reference.py that turns lengths and positions into rows. Only comparisons, sums and lookups: no
sort, no scan, no data-dependent shape, so that compiled code needs no extern kernel and no synchronisation. Positions
are computed in int64; row ids leave as int32, which holds them all (checks.py). A bad row or sequence, as in
reference.py, comes out as a padded one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def live_rows(num_slots: int, state_ids: Tensor, positions: Tensor) -> Tensor:
    """bool [T]: rows that are neither padded nor bad."""
    return (state_ids >= 0) & (state_ids < num_slots) & (positions >= 0)


def visible_range(
    num_slots: int, state_ids: Tensor, positions: Tensor, valid_start: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """First visible position `lo` and count `n` of each query, int64 [T]: lo = max(p - W + 1, valid_start, 0)."""
    lo = (positions - window + 1).clamp(min=0)
    if valid_start is not None:
        lo = torch.maximum(lo, valid_start.to(lo.dtype))
    n = (positions - lo + 1).clamp(min=0)
    return lo, torch.where(live_rows(num_slots, state_ids, positions), n, 0)


def decode_index(
    state_ids: Tensor,
    positions: Tensor,
    valid_start: Tensor | None,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """offset_len int32 [T, 2] and index int32 [T, width] (api.decode_index)."""
    lo, n = visible_range(num_slots, state_ids, positions, valid_start, window)
    live = n > 0
    base = torch.where(live, state_ids, 0).long() * ring_rows
    row = torch.where(live, lo % ring_rows, 0)
    offset_len = columns(torch.where(live, base + row, -1), n)
    column = torch.arange(width, device=state_ids.device)
    rows = base[:, None] + (row[:, None] + column) % ring_rows
    index = torch.where(column < n[:, None], rows, -1)
    return offset_len.int(), index.int()


LENGTH_LIMIT = 2**62
"""No sequence is longer: positions behind it stay far from the end of int64."""


def prepare_decode(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    valid_start: Tensor | None,
    draft_counts: Tensor | None,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None,
) -> tuple[Tensor, ...]:
    """The fields of DecodeMetadata (index of 0 columns without `width`), lengths int64 [B], errors int32 [1]."""
    first = lengths + accepted.clamp(min=0)
    start = torch.zeros_like(first) if valid_start is None else valid_start.long().clamp(min=0)
    bad = (state_ids >= num_slots) | (state_ids < -1) | (lengths < 0) | (lengths > LENGTH_LIMIT)
    bad = bad | (accepted > tokens_per_step) | (start > first)
    j = torch.arange(tokens_per_step, device=lengths.device)
    runs = j >= 0
    if draft_counts is not None:
        bad = bad | (draft_counts >= tokens_per_step)
        runs = j <= draft_counts.clamp(min=0)[:, None]
    bad = bad & (state_ids != -1)  # what else a padded sequence holds is nobody's
    live = (state_ids >= 0) & ~bad
    runs = runs & live[:, None]
    slot = torch.where(runs, state_ids[:, None], -1).flatten()
    position = torch.where(runs, first[:, None] + j, 0).flatten()
    start = torch.where(runs, start[:, None], 0).flatten().int()
    offset_len, index = decode_index(slot, position, start, window, ring_rows, num_slots, width or 0)
    return (
        slot,
        position,
        start,
        store_rows(slot >= 0, slot, position, ring_rows),
        offset_len,
        index,
        torch.where(live, first, lengths),
        bad.sum(dtype=torch.int32)[None],
    )


def store_rows(live: Tensor, state_ids: Tensor, positions: Tensor, ring_rows: int) -> Tensor:
    """int32 [T]: flat id of the row that holds each position, -1 where not `live`."""
    return torch.where(live, state_ids.long() * ring_rows + positions % ring_rows, -1).int()


def prefill_plan(
    token: Tensor,
    state_ids: Tensor,
    q_lens: Tensor,
    k_lens: Tensor,
    valid_start: Tensor | None,
    window: int,
    ring_rows: int,
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Segments, pivots and the metadata of each token (api.prefill_plan); `token` is arange(T), int64."""
    seq = torch.arange(state_ids.shape[0], device=state_ids.device)
    length = q_lens.long().clamp(min=0)
    begin = torch.where(seq[:, None] > seq, length, 0).sum(1)  # a scan would be an extern call on the CPU
    q_start = k_lens.long() - q_lens
    first = torch.zeros_like(q_start) if valid_start is None else valid_start.long().clamp(min=0)
    live = (state_ids >= 0) & (state_ids < num_slots) & (q_lens >= 0) & (first <= q_start)
    slot = torch.where(live, state_ids.long(), -1)
    segments = _segments(seq * window, slot, q_start, first, window, ring_rows)

    # A sum over the one owner of a token is a lookup that also serves tokens without an owner, and B = 0.
    owns = (token[:, None] >= begin) & (token[:, None] < begin + length)
    owner, begin_t, slot_t, q_start_t, first_t = (
        torch.where(owns, x, 0).sum(1) for x in (seq, begin, slot + 1, q_start, first)
    )
    tokens = _tokens(token, owner, begin_t, slot_t - 1, q_start_t, first_t, state_ids.shape[0] * window, window)
    return segments, *tokens


def _segments(dst: Tensor, slot: Tensor, q_start: Tensor, first: Tensor, window: int, ring_rows: int) -> Tensor:
    """Load plan int32 [B, 3, 4]: zero rows, ring rows up to the end of the ring, ring rows from its row 0."""
    zeros = torch.where(slot >= 0, (first - q_start + window).clamp(0, window), window)
    history = window - zeros
    row = torch.where(slot >= 0, (q_start - history) % ring_rows, 0)
    before_wrap = torch.minimum(history, ring_rows - row)
    part = torch.arange(3, device=slot.device)
    rows = columns(zeros, before_wrap, history - before_wrap)
    used = rows > 0
    src_slot = torch.where(used & (part > 0), slot[:, None], -1)
    src_row = torch.where(used & (part == 1), row[:, None], 0)
    dst_row = torch.where(used, dst[:, None] + columns(torch.zeros_like(zeros), zeros, zeros + before_wrap), 0)
    return columns(src_slot, src_row, dst_row, rows).int()


def _tokens(
    token: Tensor,
    owner: Tensor,
    begin: Tensor,
    slot: Tensor,
    q_start: Tensor,
    first: Tensor,
    history_rows: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pivots [T, 4], slot, position, q_start and valid_start of each token, from what its sequence `owner` has."""
    live = slot >= 0
    j = token - begin
    pos = q_start + j
    lo = torch.maximum(pos - window + 1, first)  # first is not negative
    start_slot = torch.minimum(lo, q_start) - (q_start - window)
    k_lo = (lo - q_start).clamp(min=0)
    pivots = columns(owner * window + start_slot, window - start_slot, history_rows + begin + k_lo, j - k_lo + 1)
    return (
        torch.where(live[:, None], pivots, 0).int(),
        slot.int(),
        torch.where(live, pos, 0),
        torch.where(live, q_start, 0),
        torch.where(live, first, 0).int(),
    )


def prefill_index(pivots: Tensor, window: int) -> Tensor:
    """int32 [T, W]: the two ranges of each row of pivots, concatenated, then -1 (api.prefill_index)."""
    start1, len1, start2, len2 = pivots[:, :, None].unbind(1)
    column = torch.arange(window, dtype=torch.int32, device=pivots.device)
    rows = torch.where(column < len1, start1 + column, start2 + column - len1)
    return torch.where(column < len1 + len2, rows, -1)


def ring_read_raw(
    cache: Tensor, state_ids: Tensor, positions: Tensor, valid_start: Tensor | None, window: int, dtype: torch.dtype
) -> Tensor:
    """The `window` entries up to each position, oldest first, absent ones 0 (api.ring_read_raw)."""
    start = torch.zeros_like(positions) if valid_start is None else valid_start.long().clamp(min=0)
    position = positions[:, None] - window + 1 + torch.arange(window, device=cache.device)
    present = live_rows(cache.shape[0], state_ids, positions)[:, None] & (position >= start[:, None])
    slot = torch.where(present, state_ids[:, None], 0).long()
    row = torch.where(present, position, 0) % cache.shape[1]
    # Bytes are put together by arithmetic: compiled code has no widening `view`.
    size = dtype.itemsize
    data = cache[:, :, 0][slot, row].int().unflatten(-1, (-1, size))
    shift = torch.arange(0, 8 * size, 8, dtype=torch.int32, device=cache.device)
    bits = torch.where(present[..., None], (data << shift).sum(-1, dtype=torch.int32), 0)
    return (bits if size == 4 else bits.to(torch.int16)).view(dtype)


def columns(*parts: Tensor) -> Tensor:
    """Stack along a new last dim by selection: one loop, where `stack` is a buffer with a loop per part."""
    column = torch.arange(len(parts), device=parts[0].device)
    out = parts[-1][..., None].expand(*parts[-1].shape, len(parts))
    for i, part in enumerate(parts[:-1]):
        out = torch.where(column == i, part[..., None], out)
    return out
