"""Metadata of a step as one argument of a compiled model, built on the host or by the ops.

`build` is the host's own computation, in plain Python over lists: the twin that the ops `decode_index`, `prefill_plan`
and `prepare_decode` equal bit by bit. `from_device` calls the op, for lengths that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swa_inductor.checks import check_row_ids, check_spec
from swa_inductor.checks_values import check_sequences
from swa_inductor.errors import require, require_each, require_integer
from swa_inductor.reference_inline import store_rows
from swa_inductor.spec import RingSpec


def _require_integers(state_ids: Sequence[int], **lists: Sequence[int] | None) -> int:
    """That all are sequences of integers, as many as there are state_ids; returns how many."""
    given = len(require_each("state_ids", state_ids, int, "an integer"))
    for name, values in lists.items():
        if values is not None:
            count = len(require_each(name, values, int, "an integer"))
            require(count == given, f"{name} length", count, f"{given}, that of state_ids")
    return given


def _host_rows(num_tokens: int | None, given: int) -> int:
    """T, after padding `given` tokens to `num_tokens`."""
    if num_tokens is None:
        return given
    require_integer("num_tokens", num_tokens, 0)
    require(num_tokens >= given, "num_tokens", num_tokens, f"None or at least the {given} tokens of the step")
    return num_tokens


@dataclass(frozen=True)
class DecodeMetadata:
    """Metadata of a decode step; T rows, a padded one has state id -1.

    Attributes:
        state_ids: int32 [T], slot of each token.
        positions: int64 [T].
        valid_start: int32 [T], first position that may be read, at least 0.
        store_rows: int32 [T], flat row id `slot * R + position % R` of each token's record; -1 for a padded row.
        offset_len: int32 [T, 2], see `decode_index`.
        index: int32 [T, width], see `decode_index`; None where no width was given.
    """

    state_ids: Tensor
    positions: Tensor
    valid_start: Tensor
    store_rows: Tensor
    offset_len: Tensor
    index: Tensor | None = None

    @classmethod
    def build(
        cls,
        spec: RingSpec,
        *,
        num_slots: int,
        state_ids: Sequence[int],
        positions: Sequence[int],
        valid_start: Sequence[int] | None = None,
        num_tokens: int | None = None,
        width: int | None = None,
        device: torch.device | str = "cpu",
    ) -> DecodeMetadata:
        """From Python ints, one per token; the D tokens of a sequence stand together.

        Args:
            spec: geometry of the ring.
            num_slots: slots of the cache.
            state_ids: slot of each token; -1 for a padded row, whose other values are ignored.
            positions: position of each token.
            valid_start: first position that may be read; negative reads as 0, the default.
            num_tokens: T; padded rows are added up to it. Default: as many as were given.
            width: columns of `index`, at least W; None for no index.
            device: where the tensors go, a copy each: under CUDA graph capture use `from_device`.

        Raises:
            InvalidArgumentError: lists of different lengths, or a slot, position or valid_start out of range.
        """
        check_spec(spec)
        given = _require_integers(state_ids, positions=positions, valid_start=valid_start)
        check_row_ids(spec.window, spec.rows, num_slots)
        columns = spec.window if width is None else width
        require_integer("width", columns)
        require(columns >= spec.window, "width", width, f"None or at least window={spec.window}")
        total = _host_rows(num_tokens, given)
        padded = (-1, 0, 0, -1, [-1, 0], [-1] * columns)
        rows: list[tuple[int, int, int, int, list[int], list[int]]] = []
        for t in range(given):
            slot, p, start = state_ids[t], positions[t], max(valid_start[t], 0) if valid_start is not None else 0
            require(-1 <= slot < num_slots, f"state_ids[{t}]", slot, f"-1 (padded row) to {num_slots - 1}")
            if slot < 0:
                rows.append(padded)
                continue
            require(0 <= p < 2**63, f"positions[{t}]", p, "0 and up, below 2^63")
            require(start <= p and start < 2**31, f"valid_start[{t}]", start, f"up to the position, {p}, below 2^31")
            lo, n = spec.visible(p, start)
            ids = [spec.flat_row(slot, q) for q in range(lo, p + 1)]
            rows.append((slot, p, start, ids[-1], [ids[0], n], ids + [-1] * (columns - n)))
        rows += [padded] * (total - given)
        slots, at, starts, own, offset_len, index = ([row[i] for row in rows] for i in range(6))
        return cls(
            _tensor(slots, torch.int32, device),
            _tensor(at, torch.int64, device),
            _tensor(starts, torch.int32, device),
            _tensor(own, torch.int32, device),
            _tensor(offset_len, torch.int32, device, 2),
            None if width is None else _tensor(index, torch.int32, device, width),
        )

    @classmethod
    def from_device(
        cls,
        spec: RingSpec,
        *,
        num_slots: int,
        state_ids: Tensor,
        positions: Tensor,
        valid_start: Tensor | None = None,
        width: int | None = None,
    ) -> DecodeMetadata:
        """From tensors, without a synchronisation.

        Arguments and errors: `decode_index`; but no index without `width`. A bad row keeps its state id and position.
        """
        check_spec(spec)
        offset_len, index = torch.ops.swa_inductor.decode_index(
            state_ids,
            positions,
            valid_start,
            window=spec.window,
            ring_rows=spec.rows,
            num_slots=num_slots,
            width=width,
        )
        start = torch.zeros_like(state_ids) if valid_start is None else valid_start.clamp(min=0)
        own = store_rows(offset_len[:, 1] > 0, state_ids, positions, spec.rows)
        return cls(state_ids, positions, start, own, offset_len, None if width is None else index)


class PreparedDecode(NamedTuple):
    """Results of `prepare_decode` for B sequences of D tokens.

    Attributes:
        metadata: of the step, T = B * D rows.
        lengths: int64 [B], position of the first token of each sequence in this step: its base length in the next one.
        errors: int32 [1], bad sequences: of this call, or of all calls since `allocate`.
    """

    metadata: DecodeMetadata
    lengths: Tensor
    errors: Tensor

    @classmethod
    def allocate(
        cls, spec: RingSpec, batch: int, *, width: int | None = None, device: torch.device | str = "cpu"
    ) -> PreparedDecode:
        """Buffers for `prepare_decode(..., out=)`, every row padded.

        Args:
            spec: geometry of the ring; D is its `tokens_per_step`.
            batch: B.
            width: columns of `index`, at least W; None for no index.
            device: where the buffers live.

        Raises:
            InvalidArgumentError: a negative batch, or a width below W.
        """
        check_spec(spec)
        require_integer("batch", batch, 0)
        tokens = batch * spec.tokens_per_step
        return cls(
            DecodeMetadata.build(
                spec, num_slots=1, state_ids=[], positions=[], num_tokens=tokens, width=width, device=device
            ),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class PrefillMetadata:
    """Metadata of a prefill batch of B sequences; T tokens, a padded one has state id -1.

    Attributes:
        segments: int32 [B, 3, 4], load plan of the history, see `prefill_plan`.
        pivots: int32 [T, 4], visible workspace rows of each token, see `prefill_plan`.
        state_ids: int32 [T], slot of each token.
        positions: int64 [T].
        q_starts: int64 [T], position of the first new token of each token's sequence, as `attention_prefill` takes it.
        valid_start: int32 [T], first position that may be read, at least 0.
    """

    segments: Tensor
    pivots: Tensor
    state_ids: Tensor
    positions: Tensor
    q_starts: Tensor
    valid_start: Tensor

    @classmethod
    def build(
        cls,
        spec: RingSpec,
        *,
        num_slots: int,
        state_ids: Sequence[int],
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        valid_start: Sequence[int] | None = None,
        num_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PrefillMetadata:
        """From Python ints, one per sequence.

        Args:
            spec: geometry of the ring.
            num_slots: slots of the cache.
            state_ids: slot of each sequence; -1 for a padded one, of which only q_len counts.
            q_lens: new tokens of each sequence.
            k_lens: tokens after this step, the new ones included.
            valid_start: first position that may be read; negative reads as 0, the default.
            num_tokens: T; padded tokens are added up to it. Default: the sum of q_lens.
            device: where the tensors go, a copy each: under CUDA graph capture use `from_device`.

        Raises:
            InvalidArgumentError: lists of different lengths, a slot out of range, a negative length, k_len < q_len,
                valid_start > q_start, or fewer tokens than the sum of q_lens.
        """
        check_spec(spec)
        batch, w = _require_integers(state_ids, q_lens=q_lens, k_lens=k_lens, valid_start=valid_start), spec.window
        check_row_ids(w, spec.rows, num_slots)
        given = sum(q_lens)
        check_sequences(num_slots, given, state_ids, q_lens, k_lens, valid_start)
        total = _host_rows(num_tokens, given)
        segments: list[list[list[int]]] = []
        tokens: list[tuple[list[int], int, int, int, int]] = []
        for i, slot in enumerate(state_ids):
            start = max(valid_start[i], 0) if valid_start is not None else 0
            if slot < 0:
                segments.append([[-1, 0, i * w, w], _UNUSED, _UNUSED])
                tokens += [_PADDED_TOKEN] * q_lens[i]
                continue
            q_start = k_lens[i] - q_lens[i]
            segments.append(_segments_of(spec, slot, q_start, start, i * w))
            sec2 = batch * w + len(tokens)
            for j in range(q_lens[i]):
                p = q_start + j
                lo, n = spec.visible(p, start)
                old = max(q_start - lo, 0)  # visible keys that are history: the last of the W rows of section 1
                pivot = [(i + 1) * w - old, old, sec2 + j + 1 - (n - old), n - old]
                tokens.append((pivot, slot, p, q_start, start))
        tokens += [_PADDED_TOKEN] * (total - given)
        pivots, slots, at, q_starts, starts = ([token[i] for token in tokens] for i in range(5))
        return cls(
            _tensor(segments, torch.int32, device, 3, 4),
            _tensor(pivots, torch.int32, device, 4),
            _tensor(slots, torch.int32, device),
            _tensor(at, torch.int64, device),
            _tensor(q_starts, torch.int64, device),
            _tensor(starts, torch.int32, device),
        )

    @classmethod
    def from_device(
        cls,
        spec: RingSpec,
        *,
        num_slots: int,
        state_ids: Tensor,
        q_lens: Tensor,
        k_lens: Tensor,
        num_tokens: int,
        valid_start: Tensor | None = None,
    ) -> PrefillMetadata:
        """From tensors, without a synchronisation (arguments and errors: `prefill_plan`)."""
        check_spec(spec)
        return cls(
            *torch.ops.swa_inductor.prefill_plan(
                state_ids,
                q_lens,
                k_lens,
                valid_start,
                num_tokens=num_tokens,
                window=spec.window,
                ring_rows=spec.rows,
                num_slots=num_slots,
            )
        )


_UNUSED = [-1, 0, 0, 0]
_PADDED_TOKEN: tuple[list[int], int, int, int, int] = ([0, 0, 0, 0], -1, 0, 0, 0)


def _segments_of(spec: RingSpec, slot: int, q_start: int, start: int, dst: int) -> list[list[int]]:
    """The W history rows of one sequence, position by position: runs of zero rows and of adjacent ring rows."""
    out = [_UNUSED, _UNUSED, _UNUSED]
    for k in range(spec.window):
        p = q_start - spec.window + k
        absent = p < start
        row = 0 if absent else p % spec.rows
        # The ring's row 0 begins a segment of its own only where rows came before it.
        part = 0 if absent else 2 if row == 0 and out[1] is not _UNUSED or out[2] is not _UNUSED else 1
        if out[part] is _UNUSED:
            out[part] = [-1 if absent else slot, row, dst + k, 0]
        out[part][3] += 1
    return out


def _tensor(values: list[Any], dtype: torch.dtype, device: torch.device | str, *inner: int) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(len(values), *inner)


for _cls in (DecodeMetadata, PrefillMetadata):
    pytree.register_dataclass(_cls, field_names=[f.name for f in fields(_cls)])
