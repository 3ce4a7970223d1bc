"""The record formats: every number of the format, against torch's own conversions where it has them."""

from __future__ import annotations

import pytest
import torch

from swa_inductor import records


def scale_and_data(values: list[float] | torch.Tensor, min_amax: float = 1e-4) -> tuple[int, torch.Tensor]:
    x = torch.zeros(32)
    x[: len(values)] = torch.as_tensor(values)
    stored = records.encode(x, "mxfp8", min_amax)
    return int(stored[32]), stored[: len(values)]


def read(values: list[float]) -> list[float]:
    x = torch.zeros(32)
    x[: len(values)] = torch.tensor(values)
    return records.decode(records.encode(x, "mxfp8", 1e-4), "mxfp8")[: len(values)].tolist()


@pytest.mark.parametrize(
    ("amax", "byte"), [(0.0, 105), (1e-30, 105), (448.0, 127), (448.00003, 128), (500.0, 128), (3.4028235e38, 247)]
)
def test_scale_byte(amax: float, byte: int) -> None:
    """B1, B3: a zero block gets byte 105; the exponent is rounded up, so the maximum never saturates."""
    assert scale_and_data([amax])[0] == byte


@pytest.mark.parametrize("k", range(-12, 101))
def test_scale_byte_of_powers(k: int) -> None:
    value = torch.tensor(448.0 * 2.0**k if k <= 100 else 0.0)
    assert scale_and_data([float(value)])[0] == 127 + k
    above = torch.nextafter(value, torch.tensor(float("inf")))
    assert scale_and_data([float(above)])[0] == 128 + k


def test_scale_rule_is_ceil_log2() -> None:
    """Of a million random maxima: byte = ceil(log2(amax / 448)) + 127, computed in fp64."""
    g = torch.Generator().manual_seed(0)
    amax = torch.rand(1 << 20, generator=g) * torch.exp2(torch.randint(-13, 60, (1 << 20,), generator=g).float())
    x = torch.zeros(len(amax), 32)
    x[:, 7] = -amax
    byte = records.encode(x, "mxfp8", 1e-4)[:, 32]
    want = torch.ceil(torch.log2(amax.clamp(min=1e-4).double() / 448)) + 127
    assert torch.equal(byte.double(), want)


def test_floor_is_a_field_of_the_format() -> None:
    """The other public convention floors amax / 448 at 1e-4: zero block 114."""
    assert scale_and_data([0.0], min_amax=448e-4)[0] == 114


def test_scale_byte_ends_at_1() -> None:
    """Of a floor as small as the format allows; an infinity alone reaches the other end, 254."""
    assert [scale_and_data([0.0], min_amax=2.0**k)[0] for k in (-126, -118, -117, -116)] == [1, 1, 2, 3]


def test_every_nan_is_one() -> None:
    """The smallest payload too, of either sign: code 0x7F, and no part in the scale."""
    for bits in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1):
        nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        byte, data = scale_and_data(torch.stack([nan, torch.tensor(448.0)]))
        assert byte == 127 and data.tolist() == [0x7F, 0x7E]
    nan = records.ue8m0_value(torch.tensor([255, 0, 1], dtype=torch.int32))
    assert nan.view(torch.int32).tolist() == [0x7FC00000, 0x00400000, 0x00800000]


def test_raw_formats_take_any_dtype() -> None:
    """Values are rounded to the format; a vector alone is as good as vectors of tokens and heads."""
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    for name, dtype in records.RAW_DTYPES.items():
        assert torch.equal(records.decode(records.encode(x, name, 1e-4), name), x.to(dtype))
        assert torch.equal(records.encode(x[0, 0], name, 1e-4), records.encode(x, name, 1e-4)[0, 0])


@pytest.mark.parametrize("name", ["mxfp8", *records.RAW_DTYPES])
def test_on_the_device_of_the_values(name: str) -> None:
    record = records.encode_record(*torch.zeros(2, 3, 2, 64, device="meta"), name, 1e-4)
    k, v = records.decode_record(record, name, 64, 64)
    assert record.device.type == k.device.type == v.device.type == "meta" and v.shape == (3, 2, 64)
    k, v = records.decode_record(record[..., : record.shape[-1] // 2], name, 64, None)
    assert v is k


def test_records_of_any_layout_are_taken() -> None:
    """8 bytes at a time where each starts at a multiple of 8, and byte by byte elsewhere."""
    data = torch.arange(4 * 5 * 2 * 24 + 8, dtype=torch.int32).to(torch.uint8)
    slot, row = torch.tensor([3, 0, 2]), torch.tensor([4, 1, 0])
    for size, offset in ((24, 0), (24, 8), (24, 3), (23, 0)):
        cache = data.as_strided((4, 5, 2, size), (10 * size, 2 * size, size, 1), offset)
        assert torch.equal(records.take_records(cache, slot, row), cache[slot, row])
        assert torch.equal(records.take_records(cache[:, :, :, ::2], slot, row), cache[slot, row][..., ::2])


def test_values() -> None:
    assert read([500.0]) == [512.0]
    assert scale_and_data([448.0, -0.0, 1.0])[1].tolist() == [0x7E, 0x80, 0x38]
    assert read([448.0, 1.0625, 1.0625001, 126.24]) == [448.0, 1.0, 1.125, 128.0]
    tiny = 2.0**-9
    assert read([448.0, tiny / 2, 1.5 * tiny, 2.5 * tiny]) == [448.0, 0.0, 2 * tiny, 2 * tiny]


def test_nan_and_infinity() -> None:
    """NaN takes its own element only (0x7F) and no part in the scale; an infinity gives byte 254 and saturates."""
    byte, data = scale_and_data([float("nan"), 448.0, 1.0])
    assert byte == 127 and data.tolist() == [0x7F, 0x7E, 0x38]
    byte, data = scale_and_data([float("inf"), float("-inf"), 1.0])
    assert byte == 254 and data.tolist() == [0x7E, 0xFE, 0x00]


def test_every_finite_bf16_rounds_as_torch_does() -> None:
    """All 65,536 bf16 values through the e4m3 rounding, and no finite one gives a NaN code (B6, B12)."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    code = records.e4m3_codes(x).to(torch.uint8)
    finite = x.isfinite()
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(code[finite], want[finite])
    assert not ((code[finite] & 0x7F) == 0x7F).any() and (code[x.isnan()] == 0x7F).all()


def test_random_fp32_rounds_as_torch_does() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1 << 20, generator=g) * torch.exp2(torch.randint(-14, 9, (1 << 20,), generator=g).float())
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(records.e4m3_codes(x).to(torch.uint8), want)


def test_decode_every_code_and_scale() -> None:
    """B2, B8: all 256 codes as torch reads e4m3fn, times all 256 scale bytes; 0 is 2^-127 and 255 is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    value = codes.view(torch.float8_e4m3fn).double()
    for byte in range(256):
        stored = torch.cat([codes, torch.full((8,), byte, dtype=torch.uint8)])
        got = records.decode(stored, "mxfp8").double()
        want = torch.full_like(value, torch.nan) if byte == 255 else value * 2.0 ** (byte - 127)
        want = want.float().double()  # fp32 rounds the very smallest and overflows the very largest
        assert torch.equal(got.nan_to_num(nan=1e300), want.nan_to_num(nan=1e300)), byte


def test_round_trip_is_exact_in_bf16_and_idempotent() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(64, 512, generator=g).bfloat16()
    once = records.round_trip(x, "mxfp8", 1e-4)
    fp32 = records.decode(records.encode(x, "mxfp8", 1e-4), "mxfp8")
    assert torch.equal(once.float(), fp32)
    assert torch.equal(records.round_trip(once, "mxfp8", 1e-4), once)


@pytest.mark.parametrize(("name", "dtype"), records.RAW_DTYPES.items())
def test_raw_formats_are_little_endian_values(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 96).to(dtype)
    stored = records.encode(x, name, 1e-4)
    assert torch.equal(stored, x.view(torch.uint8))
    assert torch.equal(records.decode(stored, name), x)


def test_record_is_k_then_v() -> None:
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 96)
    record = records.encode_record(k, v, "mxfp8", 1e-4)
    assert torch.equal(record[..., :66], records.encode(k, "mxfp8", 1e-4))
    assert torch.equal(record[..., 66:], records.encode(v, "mxfp8", 1e-4))
    back_k, back_v = records.decode_record(record, "mxfp8", 64, 96)
    assert torch.equal(back_k, records.round_trip(k, "mxfp8", 1e-4))
    assert torch.equal(back_v, records.round_trip(v, "mxfp8", 1e-4))
