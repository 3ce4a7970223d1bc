"""From a transformers model, its config and its attention modules, to the rings of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.nn import Module
from transformers import PreTrainedModel

from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.spec import RingSpec


class LayerPlan(NamedTuple):
    """Ring of one layer. `bounded`: it would see further than `max_length`, so no sequence may grow longer."""

    spec: RingSpec
    sliding: bool
    bounded: bool


def plan_layers(model: PreTrainedModel, max_length: int, tokens_per_step: int, kv_format: str) -> list[LayerPlan]:
    """Plan of every layer of the decoder of a model; UnsupportedError says what rings cannot serve."""
    plans = []
    for plan in examine_layers(model, max_length, tokens_per_step, kv_format):
        if not isinstance(plan, LayerPlan):
            raise plan
        plans.append(plan)
    return plans


def examine_layers(
    model: PreTrainedModel, max_length: int, tokens_per_step: int, kv_format: str
) -> Iterator[LayerPlan | UnsupportedError | InvalidArgumentError]:
    """The plan of each layer, or why it has none. Raises UnsupportedError where the whole model cannot be served."""
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name}: encoder-decoder model")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) not in (
        None,
        False,
        "vision",  # text is causal then, and images come with blocks in the mask, which the mask function refuses
    ):
        raise UnsupportedError(f"{name}: bidirectional attention")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{name}: latent attention (kv_lora_rank) keeps no keys and values")
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedError(f"{name}: layers that share the keys and values of another layer")
    # A config whose layers differ has a config for each of them.
    layers = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    types = list(getattr(config, "layer_types", None) or map(_layer_type, layers))
    modules = attention_modules(model)
    for index, (layer_type, layer) in enumerate(zip(types, layers, strict=True)):
        try:
            if modules and index not in modules and layer_type in _SERVED:
                raise UnsupportedError(f"{name}: layer {index} has no attention module with keys of its own")
            yield _plan(name, index, layer_type, layer, modules.get(index), max_length, tokens_per_step, kv_format)
        except (UnsupportedError, InvalidArgumentError) as reason:
            yield reason


_SERVED = ("sliding_attention", "full_attention")


def _plan(
    name: str,
    index: int,
    layer_type: str,
    layer: Any,
    module: Module | None,
    max_length: int,
    tokens_per_step: int,
    kv_format: str,
) -> LayerPlan:
    if layer_type not in _SERVED:
        why = ", whose compressed keys are no ring" if "compressed" in layer_type else ""
        raise UnsupportedError(f"{name}: layer {index} is {layer_type!r}{why}; rings serve sliding and full attention")
    sliding = layer_type == "sliding_attention"
    seen = layer.sliding_window if sliding else max_length
    require(isinstance(seen, int) and seen >= 1, "sliding_window", seen, "an integer of at least 1")
    spec = RingSpec(
        window=min(seen, max_length), tokens_per_step=tokens_per_step, kv_format=kv_format, **_heads(layer, module)
    )
    return LayerPlan(spec, sliding, bounded=not sliding or seen > max_length)


def attention_modules(model: PreTrainedModel) -> dict[int, Module]:
    """Attention modules of the decoder by layer: those that project keys and know their layer."""
    modules: dict[int, Module] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and _features(module, "k_proj", "kv_proj"):
            modules.setdefault(index, module)
    return modules


def _features(module: Any, *names: str) -> int | None:
    """Features of the first of these projections that a module has: of this rank, where they are split."""
    for name in names:
        projection: Any = getattr(module, name, None)
        if getattr(projection, "out_features", None) is not None:
            weight = getattr(projection, "weight", None)
            return weight.to_local().shape[0] if isinstance(weight, DTensor) else projection.out_features
    return None


def _heads(config: Any, module: Any) -> dict[str, Any]:
    """KV heads and head dims of a RingSpec: those of the layer's projections where it has them, else of its config."""
    head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if module is None:
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        v_head_dim = getattr(config, "v_head_dim", None) or head_dim
        return {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "v_head_dim": v_head_dim}
    keys = _features(module, "k_proj", "kv_proj")
    assert keys is not None  # attention_modules
    values = _features(module, "v_proj") or keys  # without one, they are made of the keys
    num_kv_heads = keys // head_dim
    if num_kv_heads == 0 or keys % head_dim or values % num_kv_heads:
        raise UnsupportedError(f"{config.model_type}: {keys} key and {values} value features, head_dim {head_dim}")
    heads = {"head_dim": head_dim, "num_kv_heads": num_kv_heads}
    shared = _features(module, "k_proj") is None  # one vector is key and value; RingLayer.update sees whether it is
    return heads | ({"shared_kv": True} if shared else {"v_head_dim": values // num_kv_heads})


def _layer_type(config: Any) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    return "full_attention" if getattr(config, "attention_chunk_size", None) is None else "chunked_attention"
