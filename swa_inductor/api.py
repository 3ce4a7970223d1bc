"""Public functions. Each one unpacks a RingSpec into the arguments of its op; there is no logic here."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor.spec import RingSpec


def store(k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, *, spec: RingSpec) -> None:
    """Write the record of each token into row `position % R` of the ring of its slot, in place.

    Args:
        k: [T, num_kv_heads, head_dim], bf16, fp16 or fp32, after norm and RoPE; any strides.
        v: [T, num_kv_heads, v_head_dim], dtype of `k`; None when K = V.
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes], any strides but adjacent record bytes; written.
        state_ids: int32 [T], slot of each token's sequence; -1 for a padded row, which writes no byte.
        positions: int64 [T], from 0. The tokens of one sequence stand together in order of position; of more than R
            tokens of a sequence only the last R are written, so a row has one writer and the bytes do not depend on
            scheduling.
        spec: geometry and record format of the ring.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device, at trace time as in eager mode; in eager mode on
            the CPU also a wrong state id or position. Compiled code and CUDA devices treat such a row as padded.

    Example: a decode step first stores its new tokens, then calls `attention`.
    """
    torch.ops.swa_inductor.store(k, v, cache, state_ids, positions, kv_format=spec.kv_format, min_amax=spec.min_amax)


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
    tokens_per_step: int = 1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query over the last `window` tokens of its own sequence, read from the ring.

    With `lo = max(p - W + 1, valid_start, 0)`, keys j in [lo, p] and `s_j = softcap(scale * q.k_j)`:
    `out = sum_j e^(s_j - m) v_j / (sum_j e^(s_j - m) + e^(sink - m))`, where m is the largest term.

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
    out, lse = torch.ops.swa_inductor.attention(
        q,
        cache,
        state_ids,
        positions,
        valid_start,
        sinks,
        window=spec.window,
        scale=spec.head_dim**-0.5 if scale is None else scale,
        kv_format=spec.kv_format,
        v_head_dim=spec.v_head_dim,
        tokens_per_step=tokens_per_step,
        softcap=softcap,
        return_lse=return_lse,
    )
    return (out, lse) if return_lse else out
