"""DecodeMetadata and PrefillMetadata: what the host refuses, padding, and metadata as an argument of compiled code."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from cases import flat
from numerics import assert_same
from runs import ints
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import swa_inductor as swa

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)


def decode(**changes: object) -> swa.DecodeMetadata:
    step = {"num_slots": 4, "state_ids": [3, -1], "positions": [50, 0], "width": 128}
    return swa.DecodeMetadata.build(V4, **{**step, **changes})


def prefill(**changes: object) -> swa.PrefillMetadata:
    lists = {"state_ids": [3, 0], "q_lens": [2, 3], "k_lens": [50, 3]}
    return swa.PrefillMetadata.build(V4, **{"num_slots": 4, **lists, **changes})


def test_the_ops_refuse_the_same_values_in_eager_mode() -> None:
    with pytest.raises(swa.InvalidArgumentError, match=r"valid_start\[0\]: got 49; allowed: up to q_start=48"):
        swa.prefill_plan(
            ints(3, 0), ints(2, 3), ints(50, 3), spec=V4, num_slots=4, num_tokens=5, valid_start=ints(49, 0)
        )
    with pytest.raises(swa.InvalidArgumentError, match="state_ids: got 4; allowed: -1"):
        swa.decode_index(ints(4), torch.zeros(1, dtype=torch.int64), spec=V4, num_slots=4)


def test_padding() -> None:
    """Rows up to num_tokens are padded ones, and change no other row."""
    for build, more in ((decode, 8), (prefill, 9)):
        short, long = build(), build(num_tokens=more)
        for f in dataclasses.fields(short):
            a, b = getattr(short, f.name), getattr(long, f.name)
            assert_same(b[: len(a)], a)
            assert len(b) == (len(a) if f.name == "segments" else more)
        assert (long.state_ids[len(short.state_ids) :] == -1).all()


def test_shapes_and_dtypes() -> None:
    for m in (decode(), prefill()):
        for f in dataclasses.fields(m):
            t = getattr(m, f.name)
            assert (
                t.dtype == (torch.int64 if f.name in ("positions", "q_starts") else torch.int32) and t.is_contiguous()
            )
    assert decode(width=200).index.shape == (2, 200) and decode(width=None).index is None
    assert prefill().segments.shape == (2, 3, 4) and prefill().pivots.shape == (5, 4)
    empty = swa.PrefillMetadata.build(V4, num_slots=4, state_ids=[], q_lens=[], k_lens=[])
    assert empty.segments.shape == (0, 3, 4) and empty.pivots.shape == (0, 4)


def test_from_device_is_build() -> None:
    host = prefill(valid_start=[40, 0])
    device = swa.PrefillMetadata.from_device(
        V4,
        num_slots=4,
        state_ids=ints(3, 0),
        q_lens=ints(2, 3),
        k_lens=ints(50, 3),
        valid_start=ints(40, 0),
        num_tokens=5,
    )
    for f in dataclasses.fields(host):
        assert_same(getattr(device, f.name), getattr(host, f.name))
    for start, width in ((-4, 128), (40, 131), (50, None)):
        host = decode(valid_start=[start, 0], width=width)
        lists = {"state_ids": ints(3, -1), "positions": torch.tensor([50, 0]), "valid_start": ints(start, 0)}
        device = swa.DecodeMetadata.from_device(V4, num_slots=4, width=width, **lists)
        assert (device.index is None) == (host.index is None) == (width is None)
        for f in dataclasses.fields(host):
            if getattr(host, f.name) is not None:
                assert_same(getattr(device, f.name), getattr(host, f.name))
        assert host.store_rows.tolist() == [3 * 134 + 50, -1]
    device = swa.DecodeMetadata.from_device(V4, num_slots=4, state_ids=ints(3), positions=torch.tensor([50]))
    assert device.index is None and device.store_rows.tolist() == [3 * 134 + 50]


def test_every_tensor_is_on_the_device() -> None:
    """Also where there are no tokens; dtypes are the same then."""
    none = {"state_ids": [], "positions": []}, {"state_ids": [], "q_lens": [], "k_lens": []}
    for some, empty in ((decode, decode(device="meta", **none[0])), (prefill, prefill(device="meta", **none[1]))):
        for f in dataclasses.fields(empty):
            got, like = getattr(some(device="meta"), f.name), getattr(some(), f.name)
            assert got.device.type == getattr(empty, f.name).device.type == "meta"
            assert got.dtype == getattr(empty, f.name).dtype == like.dtype and got.shape == like.shape
    assert {t.device.type for t in flat(swa.PreparedDecode.allocate(V4, 3, width=128, device="meta"))} == {"meta"}


def test_what_is_allowed_is_built() -> None:
    """The ends of each range: slot 0, position 0, a valid start at the position itself, no more tokens than given."""
    m = decode(state_ids=[-1, 0, 1], positions=[0, 0, 70], valid_start=[0, 0, 70], num_tokens=3)
    assert m.offset_len.tolist() == [[-1, 0], [0, 1], [134 + 70, 1]]
    assert m.index[:, 0].tolist() == [-1, 0, 134 + 70] and (m.index[:, 1:] == -1).all()
    assert decode().offset_len.tolist() == [[3 * 134, 51], [-1, 0]]  # valid from 0 on
    p = prefill(state_ids=[-1, 0, -1], q_lens=[2, 3, 1], k_lens=[50, 3, 1], num_tokens=6)
    assert p.state_ids.tolist() == [-1, -1, 0, 0, 0, -1] and p.positions.tolist() == [0, 0, 0, 1, 2, 0]
    unused = [-1, 0, 0, 0]
    assert p.segments[0].tolist() == [[-1, 0, 0, 128], unused, unused]


def test_step_buffers() -> None:
    """D3: fresh buffers hold padded rows only, each an allocation of its own."""
    for width in (None, 130):
        step = swa.PreparedDecode.allocate(V4, 3, width=width)
        tensors = flat(step)
        assert len({t.data_ptr() for t in tensors}) == len(tensors) == 7 + (width is not None)
        host = decode(state_ids=[], positions=[], num_tokens=18, width=width)
        for t, expected in zip(
            tensors, (*flat(swa.PreparedDecode(host, torch.zeros(3).long(), ints(0))),), strict=True
        ):
            assert_same(t, expected)
    with pytest.raises(swa.InvalidArgumentError, match="width: got 100; allowed: None or at least window=128"):
        swa.PreparedDecode.allocate(V4, 3, width=100)


def test_frozen_and_a_pytree() -> None:
    for m in (decode(), prefill()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            m.state_ids = None
        leaves, tree = pytree.tree_flatten(m)
        assert len(leaves) == len(dataclasses.fields(m)) and all(isinstance(x, torch.Tensor) for x in leaves)
        assert type(pytree.tree_unflatten(leaves, tree)) is type(m)
        assert type(pytree.tree_map(torch.clone, m)) is type(m)


def test_an_argument_of_compiled_code() -> None:
    """One graph for every number of tokens, metadata in and metadata out."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def fn(m: swa.PrefillMetadata) -> tuple[torch.Tensor, swa.PrefillMetadata]:
        return swa.prefill_index(m.pivots, spec=V4), dataclasses.replace(m, positions=m.positions + 1)

    for tokens in (5, 8, 30):
        m = prefill(num_tokens=tokens)
        before = copy.deepcopy(m)
        index, moved = fn(m)
        assert_same(index, swa.prefill_index(m.pivots, spec=V4))
        assert_same(moved.positions, before.positions + 1)
        assert_same(m.positions, before.positions)
    assert counter.frame_count <= 2  # the first size, then any size


def test_built_inside_compiled_code() -> None:
    """The device's own lengths, without leaving the graph."""

    def fn(*args: torch.Tensor) -> torch.Tensor:
        m = swa.PrefillMetadata.from_device(
            V4, num_slots=4, state_ids=args[0], q_lens=args[1], k_lens=args[2], num_tokens=len(args[3])
        )
        return swa.prefill_index(m.pivots, spec=V4)

    args = ints(3, 0), ints(2, 3), ints(50, 3), torch.zeros(5)
    got = torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
    assert_same(got, swa.prefill_index(prefill().pivots, spec=V4))


def test_export() -> None:
    """A registered dataclass passes through torch.export."""

    class Model(torch.nn.Module):
        def forward(self, m: swa.PrefillMetadata) -> torch.Tensor:
            return swa.prefill_index(m.pivots, spec=V4)

    program = torch.export.export(Model(), (prefill(),))
    assert_same(program.module()(prefill()), swa.prefill_index(prefill().pivots, spec=V4))
