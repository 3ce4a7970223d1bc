"""Public functions. Each one unpacks a RingSpec into the arguments of its op; there is no logic here."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor.api_store import store
from swa_inductor.checks import check_merge, check_raw_values, check_spec
from swa_inductor.spec import RawRingSpec, RingSpec


def attention(
    q: Tensor,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    scale: float | None = None,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_norm_eps: float | None = None,
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    inverse_rope: bool = False,
    tokens_per_step: int = 1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over the last `window` tokens of its own sequence, read from the ring.

    With `lo = max(p - W + 1, valid_start, 0)`, keys j in [lo, p] and `s_j = softcap(scale * q.k_j)`:
    `out = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink - m))`, where m is the largest term.

    On request q is normed and turned first, `q' = rope(rms_norm(q))`, and the output turned back last, all at the
    query's position: in compiled code parts of the same kernel, with no rounding but that of q' to the dtype of q.

    Args:
        q: [T, num_heads, head_dim], bf16, fp16 or fp32; num_heads a multiple of num_kv_heads.
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes], as written by `store`; read only.
        state_ids: int32 [T]; -1 for a padded row: its output is 0 and its lse -inf.
        positions: int64 [T], position of each query, already stored.
        spec: geometry and record format of the ring.
        scale: factor on q.k; default head_dim ** -0.5.
        valid_start: int32 [T], first position of the sequence that may be read; default 0.
        sinks: [num_heads], a logit that takes part in the softmax with no value.
        softcap: logits become `softcap * tanh(logit / softcap)`.
        q_norm_eps: RMSNorm of each query head, `q / sqrt(mean(q^2) + eps) * q_norm_weight`; None for no norm.
        q_norm_weight: [head_dim], bf16, fp16 or fp32; None for ones.
        rope: fp32 [num_positions, rope_dim], cos, then sin, of each position and pair: turns the last rope_dim dims,
            (a, b) -> (a cos - b sin, b cos + a sin). A row whose position lies beyond the table is a padded row.
        rope_interleaved: pairs are adjacent dims (2i, 2i + 1), else halves (i, i + rope_dim / 2).
        inverse_rope: turn the last rope_dim dims of the output back, for values that carry RoPE, as with K = V.
        tokens_per_step: every run of this many rows is one sequence at consecutive positions (some may be padded),
            which then share one read of the ring; T must be a multiple.
        return_lse: also return the natural log of the softmax denominator, without the sink.

    Returns:
        out [T, num_heads, v_head_dim] in the dtype of q; with `return_lse` also lse, fp32 [T, num_heads].
        A non-finite value in a visible V vector makes the whole output vector NaN; records that are not visible have
        no influence, whatever they hold.

    Raises:
        InvalidArgumentError: as in `store`.
    """
    check_spec(spec, cache)
    out, lse = torch.ops.swa_inductor.attention(
        q,
        cache,
        state_ids,
        positions,
        valid_start,
        sinks,
        q_norm_weight,
        rope,
        window=spec.window,
        scale=spec.head_dim**-0.5 if scale is None else scale,
        kv_format=spec.kv_format,
        v_head_dim=spec.v_head_dim,
        tokens_per_step=tokens_per_step,
        softcap=softcap,
        return_lse=return_lse,
        q_norm_eps=q_norm_eps,
        rope_interleaved=rope_interleaved,
        inverse_rope=inverse_rope,
    )
    return (out, lse) if return_lse else out


def ring_write_raw(values: Tensor, cache: Tensor, state_ids: Tensor, positions: Tensor, *, spec: RawRingSpec) -> None:
    """Write the entry of each token into row `position % entries` of the raw ring of its slot, in place.

    Args:
        values: [T, width], bf16, fp16 or fp32; cast to the dtype of the ring, not quantised.
        cache: uint8 [num_slots, entries, 1, bytes of an entry], as `StateLayout.compression_view` gives it; written.
        state_ids, positions: as in `store`.
        spec: geometry of the ring.

    Raises:
        InvalidArgumentError: as in `store`.
    """
    check_spec(spec, cache, RawRingSpec)
    check_raw_values(values, cache, spec.width)
    store(values[:, None], None, cache, state_ids, positions, spec=spec.ring)


def ring_read_raw(
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RawRingSpec,
    valid_start: Tensor | None = None,
) -> Tensor:
    """The last `ratio` entries of each sequence up to a position.

    Args:
        cache: uint8 [num_slots, entries, 1, bytes of an entry], as written by `ring_write_raw`; read only.
        state_ids: int32 [T]; -1 for a padded row.
        positions: int64 [T], the last entry to read, already written.
        spec: geometry of the ring.
        valid_start: int32 [T], first position of the sequence that may be read; default 0.

    Returns:
        [T, ratio, width] in the dtype of the ring, oldest entry first: column c holds position `p - ratio + 1 + c`.
        Absent entries are 0: those below max(valid_start, 0), and all of a padded row. Values are exact; compiled code
        may change the payload of a NaN.

    Raises:
        InvalidArgumentError: as in `store`.
    """
    check_spec(spec, cache, RawRingSpec)
    return torch.ops.swa_inductor.ring_read_raw(
        cache, state_ids, positions, valid_start, window=spec.ratio, kv_format=spec.dtype
    )


def gather(
    cache: Tensor,
    state_ids: Tensor,
    q_starts: Tensor,
    *,
    spec: RingSpec,
    dtype: torch.dtype,
    valid_start: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The workspace of a prefill: W history rows per sequence, dequantised, then the new tokens.

    Args:
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes]; read only, so gather before storing.
        state_ids: int32 [B], slot of each sequence, -1 for none (W zero rows).
        q_starts: int64 [B], position of the first new token of each sequence.
        spec: geometry and record format of the rings.
        dtype: of the workspace: bf16, fp16 or fp32.
        valid_start: int32 [B], first position that may be read; default 0.
        k, v: new tokens [T, num_kv_heads, dim] in `dtype`, appended after the history; v None when K = V.

    Returns:
        K [B * W + T, num_kv_heads, head_dim] and V likewise (None when K = V). History row `b * W + i` holds position
        `q_starts[b] - W + i`, zeros where that lies below max(valid_start, 0). After a rollback by the most that is
        allowed, row 0 of the history, which no query sees, may hold a record that was written since.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device.
    """
    check_spec(spec, cache)
    out_k, out_v = torch.ops.swa_inductor.gather(
        cache,
        state_ids,
        q_starts,
        valid_start,
        k,
        v,
        window=spec.window,
        kv_format=spec.kv_format,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=dtype,
    )
    return out_k, None if spec.v_head_dim is None else out_v


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    q_starts: Tensor,
    *,
    spec: RingSpec,
    scale: float | None = None,
    valid_start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_norm_eps: float | None = None,
    q_norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    inverse_rope: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over their history, read from the ring, and themselves; without a workspace.

    Call it before the new tokens are stored: storing first would overwrite history that they still see. Prefill chunks,
    decode tokens and padding may be mixed.

    Args:
        q: [T, num_heads, head_dim]; k: [T, num_kv_heads, head_dim]; v: likewise, None when K = V; one dtype. Give k and
            v as they will be read back (`store_cast_back`, or records.round_trip), so that any split of a prompt into
            chunks gives the same outputs.
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes]; read only.
        state_ids: int32 [T]; -1 for a padded row. The tokens of a sequence stand together, in order of position.
        positions: int64 [T].
        q_starts: int64 [T], position of the first new token of the token's sequence, which is in this call.
        spec, scale, valid_start (int32 [T]), sinks, softcap, return_lse: as in `attention`.
        q_norm_eps, q_norm_weight, rope, rope_interleaved, inverse_rope: as in `attention`; k is as it is stored.

    Returns and raises as `attention` does.
    """
    check_spec(spec, cache)
    out, lse = torch.ops.swa_inductor.attention_prefill(
        q,
        k,
        v,
        cache,
        state_ids,
        positions,
        q_starts,
        valid_start,
        sinks,
        q_norm_weight,
        rope,
        window=spec.window,
        scale=spec.head_dim**-0.5 if scale is None else scale,
        kv_format=spec.kv_format,
        softcap=softcap,
        return_lse=return_lse,
        q_norm_eps=q_norm_eps,
        rope_interleaved=rope_interleaved,
        inverse_rope=inverse_rope,
    )
    return (out, lse) if return_lse else out


def attention_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    pivots: Tensor,
    *,
    window: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over two row ranges of a workspace per query.

    Args:
        q: [T, num_heads, head_dim]; k: [rows, num_kv_heads, head_dim]; v: likewise, None when K = V; one dtype.
        pivots: int32 [T, 4] = (start1, len1, start2, len2), rows of the workspace; len1 + len2 <= window.
        window: most keys of a query. scale: default head_dim ** -0.5. sinks, softcap, return_lse: as in `attention`.

    Returns and raises as `attention` does; a query with two empty ranges gets 0 and -inf.
    """
    out, lse = torch.ops.swa_inductor.attention_workspace(
        q,
        k,
        v,
        pivots,
        sinks,
        window=window,
        scale=_default_scale(q) if scale is None else scale,
        softcap=softcap,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def attention_index(
    q: Tensor,
    cache: Tensor,
    index: Tensor,
    *,
    kv_format: str,
    v_head_dim: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the records that an index names, of a ring or of any other buffer of records.

    Args:
        q: [T, num_heads, head_dim].
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes]; R is any number of rows per block.
        index: int32 [T, N], flat row ids `slot * R + row`; -1 is absent, as is an id outside of the buffer.
        kv_format: record format. v_head_dim: values of a V vector; None when K = V.
        scale: default head_dim ** -0.5. sinks, softcap, return_lse: as in `attention`.

    Returns and raises as `attention` does.
    """
    out, lse = torch.ops.swa_inductor.attention_index(
        q,
        cache,
        index,
        sinks,
        scale=_default_scale(q) if scale is None else scale,
        kv_format=kv_format,
        v_head_dim=v_head_dim,
        softcap=softcap,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out


def _default_scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() else 1.0  # the op says what is wrong with q


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys, e.g. a window and compressed keys, each computed without sink.

    Plain torch: it fuses into what follows. `out = sum_i e^(lse_i - m) out_i / (sum_i e^(lse_i - m) + e^(sink - m))`.

    Args:
        out_a, out_b: [T, H, Dv]; lse_a, lse_b: fp32 [T, H], natural log, -inf where a side has no key.
        sinks: [H], taken in once, here.

    Returns:
        out [T, H, Dv] in the dtype of out_a, 0 where there is neither key nor sink, and lse [T, H] without the sink.

    Raises:
        InvalidArgumentError: shapes or devices that differ, or an lse that is not fp32 (or fp64).
    """
    check_merge(out_a, lse_a, out_b, lse_b, sinks)
    lse = torch.logaddexp(lse_a, lse_b)
    denominator = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))
    base = torch.where(denominator == -torch.inf, 0, denominator)
    weight_a, weight_b = (torch.exp(x - base)[..., None] for x in (lse_a, lse_b))
    return (out_a.to(lse.dtype) * weight_a + out_b.to(lse.dtype) * weight_b).to(out_a.dtype), lse
