"""Tensor parallelism of the DeepSeek-V4 layer: each rank computes its share of the query heads."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swa_inductor.errors import require
from swa_inductor.models.deepseek_v4 import SlidingAttention


def parallelize(layer: SlidingAttention, mesh: DeviceMesh) -> SlidingAttention:
    """Split the heads of a layer over a mesh, in place.

    The merged projection, the norms and the RoPE table stay whole, and so does the ring of the one KV head: every rank
    keeps a ring of its own and stores the same bytes. The query projection and the sinks are split by heads, the first
    output projection by its groups, and the second adds up the ranks' parts: the one all-reduce of the layer. Calls
    take and return plain tensors, the same on all ranks.

    Args:
        layer: on the device of this rank, the same on all ranks; split parameters become those of the first rank, as
            DTensors.
        mesh: of one dim; its size divides o_groups (and so num_heads).

    Returns:
        The layer.

    Raises:
        InvalidArgumentError: a mesh of several dims or of a size that does not divide o_groups.
    """
    groups = layer.config.o_groups
    require(mesh.ndim == 1, "mesh", f"{mesh.ndim} dims", "one dim, such as mesh['tp']")
    require(groups % mesh.size() == 0, "mesh", f"{mesh.size()} ranks", f"a divisor of o_groups={groups}")
    for name in ("sinks", "o_a"):
        whole = getattr(layer, name)
        split = distribute_tensor(whole.detach(), mesh, [Shard(0)])
        layer.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))
    parallelize_module(layer, mesh, {"q_b": ColwiseParallel(), "o_b": RowwiseParallel()})
    return layer
