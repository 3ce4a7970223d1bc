"""What every op means, in plain torch: the oracle of the tests and the eager implementation.

Everything is written with integer arithmetic where bits matter, so that eager, C++ and Triton code agree to the bit.
Metadata conventions: a *padded row* has state id -1. A row with bad metadata (state id >= num_slots, negative position,
valid_start > position) counts as padded: it writes nothing and reads nothing.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from swa_inductor.spec import MXFP8_BLOCK, vector_bytes

RAW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Formats whose records are raw little-endian values."""

# ---------------------------------------------------------------------------------------------------- records


def encode(x: Tensor, kv_format: str, min_amax: float) -> Tensor:
    """Vectors [..., D] -> stored bytes uint8 [..., vector_bytes].

    mxfp8 (blocks of 32 along D): byte = ceil(log2(amax / 448)) + 127, by integers; data = e4m3fn(x * 2^(127 - byte)),
    round to nearest even, saturating. NaN gives data 0x7F and does not take part in amax; an infinity gives byte 254.
    """
    return _bytes(x, kv_format, min_amax).to(torch.uint8)


def _bytes(x: Tensor, kv_format: str, min_amax: float) -> Tensor:
    """Stored bytes as int32, made by arithmetic alone: compiled CPU code has no uint8 `cat` and no widening `view`."""
    if kv_format != "mxfp8":
        x = x.to(RAW_DTYPES[kv_format]).contiguous()
        bits = x.view(torch.int32) if x.element_size() == 4 else x.view(torch.int16).int()
        shifts = torch.arange(0, 8 * x.element_size(), 8, dtype=torch.int32, device=x.device)
        return ((bits[..., None] >> shifts) & 0xFF).flatten(-2)
    x = x.float().unflatten(-1, (-1, MXFP8_BLOCK))
    scale = block_scale(x, min_amax)
    # 2^(127 - byte) in two factors: for byte 254 it is subnormal, and compiled CPU code may flush subnormals.
    half = (127 - scale) >> 1
    data = e4m3_codes(x * _exp2(half) * _exp2(127 - scale - half))
    return torch.cat([data.flatten(-2), scale.squeeze(-1)], -1)


def block_scale(x: Tensor, min_amax: float) -> Tensor:
    """ue8m0 byte (int32) of each block: fp32 [..., 32] -> [..., 1]."""
    bits = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    bits = torch.where(bits > 0x7F800000, 0, bits)
    # Positive floats order as their bits do, so the maximum of the bits is the maximum of the values.
    bits = bits.amax(-1, keepdim=True).clamp(min=float_bits(min_amax))
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return torch.where(bits == 0x7F800000, 254, byte.clamp(1, 254))


def e4m3_codes(y: Tensor) -> Tensor:
    """fp32 -> e4m3fn codes as int32: round to nearest even, saturate at 448, keep the sign of zero, NaN -> 0x7F."""
    bits = y.contiguous().view(torch.int32)
    mag = torch.where(bits & 0x7FFFFFFF > 0x7F800000, 0, bits & 0x7FFFFFFF).clamp(max=float_bits(448.0))
    normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 leaves a mantissa step of 2^-9, the step of e4m3 subnormals: the addition itself rounds to even.
    subnormal = (mag.view(torch.float32) + 16384.0).view(torch.int32) - float_bits(16384.0)
    code = torch.where(mag < float_bits(2.0**-6), subnormal, normal) | ((bits >> 24) & 0x80)
    return torch.where(bits & 0x7FFFFFFF > 0x7F800000, 0x7F, code)


def decode(stored: Tensor, kv_format: str) -> Tensor:
    """Stored bytes uint8 [..., vector_bytes] -> values [..., D]: fp32 for mxfp8, else the format's dtype. Exact."""
    if kv_format != "mxfp8":
        return stored.view(RAW_DTYPES[kv_format])
    dim = stored.shape[-1] * MXFP8_BLOCK // (MXFP8_BLOCK + 1)
    data, scale = stored[..., :dim].int(), stored[..., dim:].int()
    # e4m3 bits placed in fp16 read as value / 2^8, subnormals included; only the NaN code needs a case of its own.
    half = (((data & 0x7F) << 7) | ((data & 0x80) << 8)).to(torch.int16).view(torch.float16)
    value = torch.where((data & 0x7F) == 0x7F, math.nan, half.float() * 256.0)
    return (value.unflatten(-1, (-1, MXFP8_BLOCK)) * ue8m0_value(scale)[..., None]).flatten(-2)


def ue8m0_value(byte: Tensor) -> Tensor:
    """2^(byte - 127) as fp32; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def take_records(cache: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    """cache[slot, row]. In eager code only: moving 8 bytes at a time where strides allow is 6 times as fast on the CPU."""
    steps = (*cache.stride()[:3], cache.shape[3], cache.storage_offset())
    return cache.view(torch.int64)[slot, row].view(torch.uint8) if not any(n % 8 for n in steps) else cache[slot, row]


def encode_record(k: Tensor, v: Tensor | None, kv_format: str, min_amax: float) -> Tensor:
    """K and V vectors [T, H_kv, D] -> records uint8 [T, H_kv, record]: the K vector, then V unless K = V."""
    stored = _bytes(k, kv_format, min_amax)
    if v is not None:
        stored = torch.cat([stored, _bytes(v, kv_format, min_amax)], -1)
    return stored.to(torch.uint8)


def decode_record(record: Tensor, kv_format: str, head_dim: int, v_head_dim: int | None) -> tuple[Tensor, Tensor]:
    """Records uint8 [..., record] -> K [..., head_dim] and V [..., v_head_dim] (the same tensor when K = V)."""
    split = vector_bytes(kv_format, head_dim)
    k = decode(record[..., :split], kv_format)
    return k, k if v_head_dim is None else decode(record[..., split:], kv_format)


def round_trip(x: Tensor, kv_format: str, min_amax: float) -> Tensor:
    """Values as they will be read back from the ring, in the dtype of `x`."""
    return decode(encode(x, kv_format, min_amax), kv_format).to(x.dtype)


def float_bits(value: float) -> int:
    """Bit pattern of a value as fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _exp2(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for exponents of normal numbers (int32)."""
    return ((exponent + 127) << 23).view(torch.float32)


# ---------------------------------------------------------------------------------------------------- ring


def live_rows(cache: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
    """bool [T]: rows that are neither padded nor bad."""
    return (state_ids >= 0) & (state_ids < cache.shape[0]) & (positions >= 0)


def visible_range(
    cache: Tensor, state_ids: Tensor, positions: Tensor, valid_start: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """First visible position `lo` and count `n` of each query, int64 [T]: lo = max(p - W + 1, valid_start, 0)."""
    lo = (positions - window + 1).clamp(min=0)
    if valid_start is not None:
        lo = torch.maximum(lo, valid_start.to(lo.dtype))
    n = (positions - lo + 1).clamp(min=0)
    return lo, torch.where(live_rows(cache, state_ids, positions), n, 0)


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
    records = encode_record(k, v, kv_format, min_amax)
    return slot, row, torch.where(some, records[source], cache[0, 0])


def store(
    k: Tensor, v: Tensor | None, cache: Tensor, state_ids: Tensor, positions: Tensor, kv_format: str, min_amax: float
) -> None:
    """Write each token's record into row `position % R` of its slot (api.store)."""
    if k.shape[0]:
        slot, row, records = store_plan(k, v, cache, state_ids, positions, kv_format, min_amax)
        cache.index_put_((slot, row), records)


# ---------------------------------------------------------------------------------------------------- attention

_CHUNK_VALUES = 1 << 25
"""Gathered K and V values held at a time: bounds the memory of the eager path, 128 MB each in fp32."""


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
    tokens, heads, dim = q.shape
    out = q.new_empty((tokens, heads, dim if v_head_dim is None else v_head_dim), dtype=compute_dtype)
    lse = q.new_empty((tokens, heads), dtype=compute_dtype)
    if tokens == 0:
        return out, lse
    lo, n = visible_range(cache, state_ids, positions, valid_start, window)
    # Reading the longest window back is free on the CPU; on a device it would be a synchronisation.
    width = int(n.max()) if n.device.type == "cpu" else window
    if width == 0:
        return out.zero_(), lse.fill_(-math.inf)
    column = torch.arange(width, device=q.device)
    chunk = max(1, _CHUNK_VALUES // (width * cache.shape[2] * max(dim, out.shape[-1])))
    for t in range(0, tokens, chunk):
        part = slice(t, t + chunk)
        visible = column < n[part, None]
        slot = torch.where(visible, state_ids[part, None].long(), 0)
        row = torch.where(visible, (lo[part, None] + column) % cache.shape[1], 0)
        k, v = decode_record(take_records(cache, slot, row), kv_format, dim, v_head_dim)
        out[part], lse[part] = attend(
            q[part].to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype), visible, sinks, scale, softcap
        )
    return out, lse


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
    # 0 * NaN is NaN: values that no number is leave V. On the CPU, most calls can be seen to hold none in one pass.
    if v.device.type != "cpu" or not v.sum().isfinite():
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
