"""RingSpec: the numbers of a ring, and what is refused."""

from __future__ import annotations

import pytest
import torch

import swa_inductor as swa


def test_the_numbers_of_the_model_that_set_them() -> None:
    spec = swa.RingSpec(128, 6, 512, shared_kv=True)
    assert (spec.rows, spec.record_bytes, spec.ring_bytes) == (134, 528, 70_752)
    assert spec.ring_bytes % 32 == 0 and 20 * spec.ring_bytes == 1_415_040
    assert spec.cache_shape(4) == (4, 134, 1, 528)
    assert spec.max_rollback == 7 and spec.output_head_dim == 512


@pytest.mark.parametrize(
    ("kwargs", "record"),
    [
        ({"kv_format": "mxfp8", "shared_kv": True}, 528),
        ({"kv_format": "mxfp8"}, 2 * 528),
        ({"kv_format": "mxfp8", "v_head_dim": 128}, 528 + 132),
        ({"kv_format": "bf16"}, 2 * 1024),
        ({"kv_format": "fp16", "shared_kv": True}, 1024),
        ({"kv_format": "fp32", "v_head_dim": 96}, 4 * (512 + 96)),
    ],
)
def test_record_bytes(kwargs: dict, record: int) -> None:
    got = swa.RingSpec(128, 6, 512, **kwargs).record_bytes
    assert got == record and isinstance(got, int)


def test_least_sizes() -> None:
    spec = swa.RingSpec(1, 1, 1, num_kv_heads=1, v_head_dim=1, kv_format="fp32", min_amax=1e-30)
    assert spec.cache_shape(1) == (1, 2, 1, 8) and spec.output_head_dim == 1


@pytest.mark.parametrize("d", range(1, 9))
def test_capacity(d: int) -> None:
    """A10: R = W + D - 1 is the least, one row less is refused with W, D, R and the minimum."""
    assert swa.RingSpec(128, d, 64).rows == 128 + d
    assert swa.RingSpec(128, d, 64, ring_rows=127 + d).rows == 127 + d
    with pytest.raises(swa.InvalidArgumentError, match=rf"R={126 + d} .*W=128.*D={d}.*= {127 + d}"):
        swa.RingSpec(128, d, 64, ring_rows=126 + d)


@pytest.mark.parametrize(
    ("position", "valid_start", "lo", "n", "first", "last"),
    [
        (0, 0, 0, 1, 0, 0),
        (127, 0, 0, 128, 0, 127),
        (128, 0, 1, 128, 1, 128),
        (133, 0, 6, 128, 6, 133),
        (134, 0, 7, 128, 7, 0),
        (261, 0, 134, 128, 0, 127),
        (250, 200, 200, 51, 66, 116),
        (50, -5, 0, 51, 0, 50),
    ],
)
def test_visible(position: int, valid_start: int, lo: int, n: int, first: int, last: int) -> None:
    spec = swa.RingSpec(128, 6, 512, shared_kv=True)
    assert spec.visible(position, valid_start) == (lo, n)
    assert (spec.flat_row(0, lo), spec.flat_row(0, position)) == (first, last)
    assert spec.flat_row(3, 873) == 471 and spec.flat_row(3, 1000) == 464


def test_a_spec_may_be_made_in_compiled_code_of_numbers_that_vary() -> None:
    """Dynamo makes symbols of numbers that differ from layer to layer, which it can compare but not print."""

    def layer(window: int, steps: int, dim: int, floor: float):  # noqa: ANN202
        def fn(k: torch.Tensor, cache: torch.Tensor, state_ids: torch.Tensor, positions: torch.Tensor) -> None:
            assert swa.RawRingSpec(window, steps, dim).ring.rows == window + steps - 1
            spec = swa.RingSpec(window, steps, dim, shared_kv=True, min_amax=floor)
            swa.store(k, None, cache, state_ids, positions, spec=spec)

        return fn

    torch._dynamo.reset()
    for sizes in ((4, 1, 32, 1e-4), (7, 2, 64, 1e-3), (9, 3, 128, 1e-2)):
        shape = swa.RingSpec(*sizes[:3], shared_kv=True).cache_shape(2)
        caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
        k, meta = torch.randn(2, 1, sizes[2]), (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 4]))
        torch.compile(layer(*sizes), backend="eager", fullgraph=True)(k, caches[0], *meta)
        layer(*sizes)(k, caches[1], *meta)
        assert caches[1].any() and torch.equal(*caches)
