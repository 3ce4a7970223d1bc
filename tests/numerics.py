"""How results are judged: bytes and integers by equality, floats by their error against fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact||, over finite exact values; a NaN in `value` never passes for a number."""
    difference = (value.double() - exact.double()).norm()
    return float(difference / exact.double().norm().clamp(min=1e-300))


def assert_as_good_as(value: Tensor, exact: Tensor, plain: Tensor, factor: float = 1.0) -> None:
    """`value` is at most `factor` times as far from the fp64 result as the plain computation in the input dtype is."""
    assert value.shape == exact.shape
    error, allowed = relative_error(value, exact), factor * relative_error(plain, exact)
    assert error <= max(allowed, 1e-6), f"error {error:.3e}, allowed {allowed:.3e}"


def assert_same(value: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits (NaN included)."""
    assert value.shape == expected.shape and value.dtype == expected.dtype
    assert torch.equal(value.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
