"""Public functions that write rings: as in api.py, a docstring and the call of an op."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor.checks import check_spec
from swa_inductor.spec import RingSpec


def store(
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    norm_eps: float | None = None,
    norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
) -> None:
    """Write the record of each token into row `position % R` of the ring of its slot, in place.

    On the way, if asked, RMSNorm and RoPE of k, each computed in fp32 and rounded to the dtype of k.

    Args:
        k: [T, num_kv_heads, head_dim], bf16, fp16 or fp32; any strides.
        v: [T, num_kv_heads, v_head_dim], dtype of `k`; None when K = V.
        cache: uint8 [num_slots, R, num_kv_heads, record_bytes], any strides but adjacent record bytes; written.
        state_ids: int32 [T], slot of each token's sequence; -1 for a padded row, which writes no byte.
        positions: int64 [T], from 0. The tokens of one sequence stand together in order of position; of more than R
            tokens of a sequence only the last R are written, so a row has one writer and the bytes do not depend on
            scheduling.
        spec: geometry and record format of the ring.
        norm_eps: added to the mean square of a vector of k in its RMSNorm; None for no norm.
        norm_weight: [head_dim], bf16, fp16 or fp32; needs norm_eps.
        rope: fp32 [num_positions, rope_dim], cos, then sin, of each position and pair: turns the last rope_dim dims of
            k by its position; None for no RoPE. Positions are below num_positions.
        rope_interleaved: the pairs are adjacent dims, head_dim even; else dims i and i + rope_dim / 2 that turn.

    Raises:
        InvalidArgumentError: a wrong dtype, shape, stride or device, at trace time as in eager mode; in eager mode on
            the CPU also a wrong state id or position. Compiled code and CUDA devices treat such a row as padded.

    Example: a decode step first stores its new tokens, then calls `attention`.
    """
    check_spec(spec, cache)
    torch.ops.swa_inductor.store(
        k,
        v,
        cache,
        state_ids,
        positions,
        norm_weight,
        rope,
        kv_format=spec.kv_format,
        min_amax=spec.min_amax,
        norm_eps=norm_eps,
        rope_interleaved=rope_interleaved,
    )


def norm_store(
    x: Tensor,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    x_eps: float,
    x_weight: Tensor | None = None,
    norm_eps: float | None = None,
    norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
) -> Tensor:
    """`store`, and in the same kernel an RMSNorm of other rows `x`, such as the low-rank query beside k.

    Args:
        x: [T, N], bf16, fp16 or fp32; any strides. Rows of padded tokens are normalised like all others.
        x_eps: added to the mean square of a row of x.
        x_weight: [N], bf16, fp16 or fp32; default 1.
        k, v, cache, state_ids, positions, spec, norm_eps, norm_weight, rope, rope_interleaved: as in `store`.

    Returns:
        [T, N], contiguous: the norm of x, computed in fp32 and rounded to the dtype of x.

    Raises:
        InvalidArgumentError: as in `store`.
    """
    check_spec(spec, cache)
    return torch.ops.swa_inductor.norm_store(
        x,
        x_weight,
        k,
        v,
        cache,
        state_ids,
        positions,
        norm_weight,
        rope,
        kv_format=spec.kv_format,
        min_amax=spec.min_amax,
        x_eps=x_eps,
        norm_eps=norm_eps,
        rope_interleaved=rope_interleaved,
    )


def store_cast_back(
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    *,
    spec: RingSpec,
    norm_eps: float | None = None,
    norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`store`, and the vectors as they will be read back, so that prefill attends to the numbers that decode will read.

    Args and errors as in `store`; the result does not depend on which tokens write.

    Returns:
        k, after norm and RoPE, and v (None when K = V), both after the round trip through the record format, shapes and
        dtypes of the inputs. A padded row turns by position 0, or the last of `rope`, if its own is none.
    """
    check_spec(spec, cache)
    k_back, v_back = torch.ops.swa_inductor.store_cast_back(
        k,
        v,
        cache,
        state_ids,
        positions,
        norm_weight,
        rope,
        kv_format=spec.kv_format,
        min_amax=spec.min_amax,
        norm_eps=norm_eps,
        rope_interleaved=rope_interleaved,
    )
    return k_back, None if v is None else v_back
