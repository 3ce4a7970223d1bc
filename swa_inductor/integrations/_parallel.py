"""Tensor parallelism of transformers models with rings: each rank computes its share of the heads."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from swa_inductor.errors import UnsupportedError, require
from swa_inductor.integrations._geometry import attention_modules

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Split the heads, and the dense MLPs, of a model over a mesh, in place; then `RingCache` or `use_rings` as ever.

    Query heads, their sinks, and the KV heads go to the ranks in equal runs; a single KV head stays whole on each, and
    so do norms, embeddings, experts and the output head. A rank's rings hold its KV heads. Attention and MLP add up
    the ranks' parts: two all-reduces a layer. Calls take and return plain tensors, the same on all ranks.

    Args:
        model: on the device of this rank, the same on all ranks; split parameters become those of the first rank, as
            DTensors, sinks apart.
        mesh: of one dim; its size divides the query heads and, where there are several, the KV heads.

    Returns:
        The model.

    Raises:
        InvalidArgumentError: a mesh of several dims, or one whose size does not divide the heads.
        UnsupportedError: attention layers without q_proj, k_proj, v_proj and o_proj, or with norms over all heads.
    """
    require(mesh.ndim == 1, "mesh", f"{mesh.ndim} dims", "one dim, such as mesh['tp']")
    ranks, name = mesh.size(), model.config.model_type
    attention = attention_modules(model)
    if not attention:
        raise UnsupportedError(f"{name}: no attention modules that project keys and know their layer")
    plans = [(module, _attention_plan(module, name, ranks)) for module in attention.values()]
    plans += [(module, _mlp_plan(ranks, module)) for module in model.get_decoder().modules() if _is_mlp(module)]
    for module, plan in plans:  # nothing is split until all of it can be
        parallelize_module(module, mesh, plan)
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            share = sinks.detach().chunk(ranks)[mesh.get_local_rank()].clone()
            module.sinks = nn.Parameter(share, requires_grad=sinks.requires_grad)
    return model


def _attention_plan(module: Any, name: str, ranks: int) -> dict[str, ParallelStyle]:
    if not all(isinstance(getattr(module, projection, None), nn.Linear) for projection in ATTENTION):
        raise UnsupportedError(f"{name}: attention layers without {', '.join(ATTENTION)}")
    dim = module.head_dim
    for part, norm in module.named_children():
        weight = getattr(norm, "weight", None)
        if "norm" in part and weight is not None and weight.shape[0] != dim:
            raise UnsupportedError(f"{name}: {part} spans all heads")
    heads, kv_heads = module.q_proj.out_features // dim, module.k_proj.out_features // dim
    require(heads % ranks == 0, "mesh", f"{ranks} ranks", f"a divisor of the {heads} query heads")
    allowed = f"a divisor of the {kv_heads} KV heads"
    require(kv_heads == 1 or kv_heads % ranks == 0, "mesh", f"{ranks} ranks", allowed)
    split = ATTENTION[:1] if kv_heads == 1 else ATTENTION[:3]
    return {**{projection: ColwiseParallel() for projection in split}, "o_proj": RowwiseParallel()}


def _is_mlp(module: Any) -> bool:
    return all(isinstance(getattr(module, projection, None), nn.Linear) for projection in MLP)


def _mlp_plan(ranks: int, module: Any) -> dict[str, ParallelStyle]:
    """Whole, where its width does not divide."""
    if module.down_proj.in_features % ranks:
        return {}
    return {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
