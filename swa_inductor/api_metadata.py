"""Public functions for the metadata of a step, the rest of api.py: each one unpacks a RingSpec for its op.

metadata.py holds their twins on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor.checks import check_spec
from swa_inductor.errors import require
from swa_inductor.metadata import DecodeMetadata, PreparedDecode
from swa_inductor.spec import RingSpec


def decode_index(
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    num_slots: int,
    valid_start: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Ring rows that each query of a decode step sees, as a range and one by one.

    With `lo = max(p - W + 1, valid_start, 0)` and `n = p - lo + 1`, a query sees `n` rows from `lo % R` on, wrapping
    at R. A flat row id is `slot * R + row`; it is no byte offset, because caches are strided views.

    Args:
        state_ids: int32 [T]; -1 for a padded row.
        positions: int64 [T], position of each query.
        spec: geometry of the ring.
        num_slots: slots of the cache; `num_slots * R` must be below 2^31.
        valid_start: int32 [T], first position of the sequence that may be read; default 0.
        width: columns of `index`; default W, never less. A width above W does not widen the window.

    Returns:
        offset_len: int32 [T, 2], flat id of the first row and number of rows; (-1, 0) for a padded row.
        index: int32 [T, width], flat ids in order of position, then -1.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device, at trace time as in eager mode; in eager mode on the CPU
            also a slot, position or valid_start out of range. Compiled code and CUDA devices take such a row as padded.
    """
    check_spec(spec)
    return torch.ops.swa_inductor.decode_index(
        state_ids,
        positions,
        valid_start,
        window=spec.window,
        ring_rows=spec.rows,
        num_slots=num_slots,
        width=width,
    )


def prefill_plan(
    state_ids: Tensor,
    q_lens: Tensor,
    k_lens: Tensor,
    *,
    spec: RingSpec,
    num_slots: int,
    num_tokens: int,
    valid_start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Load plan and pivots of a prefill batch, from lengths that only the device knows.

    The workspace of the batch is section 1, W history rows per sequence (`q_start - W` up, also for a sequence without
    new tokens), then section 2, the T new tokens in order. `q_start = k_len - q_len`.

    Args:
        state_ids: int32 [B], slot of each sequence; -1 for a padded one.
        q_lens: int32 [B], new tokens of each sequence.
        k_lens: int32 [B], tokens of each sequence after this step, the new ones included.
        spec: geometry of the ring.
        num_slots: slots of the cache; `num_slots * R` must be below 2^31.
        num_tokens: T, at least the sum of q_lens; the tokens behind that sum are padding.
        valid_start: int32 [B], first position that may be read; negative reads as 0, the default.

    Returns:
        segments: int32 [B, 3, 4], where the rows of section 1 come from: (src_slot, src_row, dst_row, rows) of the zero
            rows (src_slot -1), of the ring rows up to the end of the ring, and of those from its row 0 on, in this
            order. dst_row counts from the start of section 1; the rows of a sequence sum up to W. A segment without
            rows is (-1, 0, 0, 0).
        pivots: int32 [T, 4], the visible ranges (start1, len1, start2, len2) of each token in the workspace, the first
            in section 1, the second in section 2; zeros for a padded token.
        token_state_ids: int32 [T], slot of each token; -1 for a padded one.
        token_positions: int64 [T]; 0 for a padded token.
        token_q_starts: int64 [T], position of the first new token of each token's sequence; 0 for a padded token.
        token_valid_start: int32 [T], at least 0; 0 for a padded token.

    Raises:
        InvalidArgumentError: a wrong dtype, shape or device, at trace time as in eager mode; in eager mode on the CPU
            also values out of range: a slot, a negative length, k_len < q_len, valid_start > q_start, num_tokens below
            the sum of q_lens. In compiled code and on CUDA devices the tokens of such a sequence are padded and its
            part of section 1 is one zero segment; a negative q_len counts as 0, and tokens past T are dropped.
    """
    check_spec(spec)
    return torch.ops.swa_inductor.prefill_plan(
        state_ids,
        q_lens,
        k_lens,
        valid_start,
        num_tokens=num_tokens,
        window=spec.window,
        ring_rows=spec.rows,
        num_slots=num_slots,
    )


def prefill_index(pivots: Tensor, *, spec: RingSpec) -> Tensor:
    """Workspace rows that each token of a prefill sees, one by one.

    Args:
        pivots: int32 [T, 4], as from `prefill_plan`.
        spec: geometry of the ring.

    Returns:
        int32 [T, W]: the two ranges of each token, concatenated, then -1.

    Raises:
        InvalidArgumentError: a wrong dtype or shape, at trace time as in eager mode.
    """
    check_spec(spec)
    return torch.ops.swa_inductor.prefill_index(pivots, window=spec.window)


def prepare_decode(
    lengths: Tensor,
    accepted: Tensor,
    state_ids: Tensor,
    *,
    spec: RingSpec,
    num_slots: int,
    valid_start: Tensor | None = None,
    draft_counts: Tensor | None = None,
    width: int | None = None,
    out: PreparedDecode | None = None,
) -> PreparedDecode:
    """Metadata of the next decode step, from what the last one left on the device: the host need not know it.

    Every sequence gets `D = spec.tokens_per_step` rows, which stand together: one sampled token and D - 1 drafts. Row j
    has position `lengths + max(accepted, 0) + j`. It is padded (slot -1, position 0, store row -1, no visible row) when
    its sequence is padded or bad, or when j exceeds `draft_counts`. Only the inputs count, and none is written: the
    same call again gives the same metadata. On CUDA one launch.

    Args:
        lengths: int64 [B], base length: tokens stored and settled when the last step began.
        accepted: int32 [B], tokens that the last step accepted, at most D; 0 where no step ran since `lengths` was set,
            which negative values read as.
        state_ids: int32 [B], slot of each sequence; -1 for a padded one, whose other values are ignored.
        spec: geometry of the ring.
        num_slots: slots of the cache; `num_slots * R` must be below 2^31.
        valid_start: int32 [B], first position of each sequence that may be read; negative reads as 0, the default.
        draft_counts: int32 [B], drafts of each sequence in this step, at most D - 1, the default; negative reads as 0.
        width: columns of `index`, at least W; None for no index.
        out: contiguous buffers as from `PreparedDecode.allocate` of the same B, spec and width, to be written in place;
            they may not share memory with the inputs. `out.errors` is added to.

    Returns:
        `out`, or new tensors: the metadata of T = B * D rows; lengths int64 [B], position of each sequence's first row,
        for a padded or bad sequence `lengths` as it came; errors int32 [1], the number of bad sequences. A bad sequence
        has a state id below -1 or from num_slots on, a length that is negative or above 2^62, more than D accepted
        tokens, more than D - 1 drafts, or a valid_start behind its first row.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device, or a buffer that is an input, at trace time as in
            eager mode; in eager mode also one that overlaps an input. Bad values are counted, never raised.
    """
    check_spec(spec)
    op = torch.ops.swa_inductor.prepare_decode
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    options = {
        "tokens_per_step": spec.tokens_per_step,
        "window": spec.window,
        "ring_rows": spec.rows,
        "num_slots": num_slots,
        "width": width,
    }
    if out is None:
        *rows, new_lengths, errors = op.default(*inputs, **options)
        return PreparedDecode(DecodeMetadata(*(rows[:-1] if width is None else rows)), new_lengths, errors)
    if not isinstance(out, PreparedDecode):
        require(False, "out", repr(out), "None or a PreparedDecode")
    m = out.metadata
    op.out(
        *inputs,
        **options,
        token_state_ids=m.state_ids,
        token_positions=m.positions,
        token_valid_start=m.valid_start,
        store_rows=m.store_rows,
        offset_len=m.offset_len,
        index=m.index,
        new_lengths=out.lengths,
        errors=out.errors,
    )
    return out
