"""Record formats: from vectors to stored bytes and back, in plain torch.

Integer arithmetic where bits matter, so that eager, C++ and Triton code agree to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swa_inductor.spec import MXFP8_BLOCK, vector_bytes

RAW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Formats whose records are raw little-endian values."""


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
    """cache[slot, row]. For eager code: moving 8 bytes at a time where strides allow is 6 times as fast on the CPU."""
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
    """Bit pattern as fp32 of a positive, normal value; plain arithmetic, which can be traced."""
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return ((exponent + 125) << 23) + round(mantissa * (1 << 24))


def _exp2(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for exponents of normal numbers (int32)."""
    return ((exponent + 127) << 23).view(torch.float32)
