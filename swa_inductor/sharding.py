"""Tensor parallelism: how the ops run on DTensors, each rank on the heads that it holds.

Query heads are split over the ranks: dim 1 of q, of out and of lse, dim 0 of sinks. Several KV heads are split with
them: dim 1 of k and v, dim 2 of the rings. A single KV head stays whole, and each rank stores the same bytes. Metadata,
norm weights and RoPE tables are the same on all ranks: plain tensors, or replicated DTensors.

An op never communicates and never moves a ring. The placement of the rings says whether KV heads are split, that of q
whether query heads are; the other arguments must fit, where a replicated one counts as any part of itself.

The rules are `__torch_dispatch__` rules of the ops for DTensor, not `register_sharding`: that caches shapes of results
without regard to bool arguments (lse is empty without `return_lse`), may answer a call by moving the rings that the op
is to write, and takes no plain tensor (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from swa_inductor.errors import require
from swa_inductor.meta._library import NAMESPACE, OPS

QUERY_HEADS = {"q": 1, "sinks": 0}
"""Arguments with query heads, by the names that they have in every op, and the dim of the heads."""
KV_HEADS = {"k": 1, "v": 1, "cache": 2}
"""Arguments with KV heads, likewise. Results of an op that takes q have query heads in dim 1."""
KV_RESULTS = {"gather", "store_cast_back"}
"""Ops whose results have KV heads, in dim 1."""


def run_on_shards(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """`op` on the local parts of its arguments, as DTensors; some are DTensors of one mesh.

    Raises:
        InvalidArgumentError: naming the argument whose mesh or placements do not fit, or whose heads do not divide.
    """
    kwargs = kwargs or {}
    # By name: an argument that is added to an op needs no rule unless it has heads.
    names = [argument.name for argument in op._schema.arguments][: len(args)]
    named = dict(zip(names, args, strict=True)) | kwargs
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    mesh = next(t for t in tensors.values() if isinstance(t, DTensor)).device_mesh
    for name, t in tensors.items():
        # A plain tensor with heads could be a part as well as the whole.
        ok = t.device_mesh == mesh if isinstance(t, DTensor) else name not in QUERY_HEADS | KV_HEADS
        came = t.device_mesh if isinstance(t, DTensor) else "a plain tensor"
        require(ok, name, came, f"a DTensor on the mesh of the others, {mesh}")
    keys, queries = _split_heads(tensors, mesh)
    given = named | {name: _local(name, t, _wanted(name, keys, queries)) for name, t in tensors.items()}
    with torch.no_grad():
        out = op(*(given[name] for name in names), **{name: given[name] for name in kwargs})
    if "q" in tensors:
        heads = queries
    else:
        heads = keys if op._schema.name.removeprefix(f"{NAMESPACE}::") in KV_RESULTS else [False] * mesh.ndim

    def wrap(part: Tensor) -> Tensor:
        # Results that were not asked for are empty, with one dim.
        placements = [Shard(1) if split and part.dim() > 1 else Replicate() for split in heads]
        return DTensor.from_local(part, mesh, placements, run_check=False)

    with torch.no_grad():
        return None if out is None else wrap(out) if isinstance(out, Tensor) else tuple(map(wrap, out))


def _split_heads(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> tuple[list[bool], list[bool]]:
    """Over which dims of the mesh KV heads are split, and over which query heads are."""
    lead = next((name for name in ("cache", "k") if name in tensors), None)
    keys = [False] * mesh.ndim if lead is None else _splits(lead, tensors[lead], KV_HEADS[lead])
    if "q" not in tensors:
        return keys, keys
    assert lead is not None  # there is no attention without keys
    q = tensors["q"]
    queries = [a or b for a, b in zip(_splits("q", q, QUERY_HEADS["q"]), keys, strict=True)]
    kv_heads = tensors[lead].shape[KV_HEADS[lead]] // math.prod(n for n, s in zip(mesh.shape, keys, strict=True) if s)
    placements = getattr(tensors[lead], "placements", None)
    allowed = f"Shard({KV_HEADS[lead]}) where q is split, as each part of it has {kv_heads} KV heads"
    require(kv_heads == 1 or queries == keys, f"{lead} placements", placements, allowed)
    # Heads are dealt out dim by dim: those of the queries of a KV head stay together if KV heads are dealt out first.
    order = [key for key, query in zip(keys, queries, strict=True) if query]
    first = "KV heads split over the first of the mesh dims that split query heads"
    require(order == sorted(order, reverse=True), f"{lead} placements", placements, first)
    parts = math.prod(n for n, split in zip(mesh.shape, queries, strict=True) if split)
    require(q.shape[1] % parts == 0, "q heads", q.shape[1], f"a multiple of the {parts} ranks that share them")
    return keys, queries


def _splits(name: str, t: Tensor, dim: int) -> list[bool]:
    """Over which dims of the mesh `dim` of a tensor is split; nothing else may be."""
    assert isinstance(t, DTensor)
    ok = all(p.is_replicate() or p.is_shard(dim) for p in t.placements)
    require(ok, f"{name} placements", t.placements, f"Shard({dim}), which splits heads, or Replicate()")
    split = [p.is_shard() for p in t.placements]
    parts = math.prod(n for n, s in zip(t.device_mesh.shape, split, strict=True) if s)
    require(
        t.shape[dim] % parts == 0, f"{name} heads", t.shape[dim], f"a multiple of the {parts} ranks that share them"
    )
    return split


def _wanted(name: str, keys: list[bool], queries: list[bool]) -> list[Placement]:
    """Placements of an argument."""
    if name in KV_HEADS:
        return [Shard(KV_HEADS[name]) if split else Replicate() for split in keys]
    return [Shard(QUERY_HEADS[name]) if split and name in QUERY_HEADS else Replicate() for split in queries]


def _local(name: str, t: Tensor, wanted: list[Placement]) -> Tensor:
    """This rank's part of an argument; the rings, by which others are judged, always are as wanted."""
    if not isinstance(t, DTensor):
        return t
    fits = all(have == want or have.is_replicate() for have, want in zip(t.placements, wanted, strict=True))
    require(fits, f"{name} placements", t.placements, f"{tuple(wanted)} here")
    with torch.no_grad():
        return t.redistribute(placements=wanted).to_local() if list(t.placements) != wanted else t.to_local()


for _name in OPS:
    torch.library.register_torch_dispatch(f"{NAMESPACE}::{_name}", DTensor, run_on_shards)
