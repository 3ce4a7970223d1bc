"""From the config of a transformers model to the rings of its layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from swa_inductor.errors import UnsupportedError, require
from swa_inductor.spec import RingSpec


class LayerPlan(NamedTuple):
    """Ring of one layer. `bounded`: it would see further than `max_length`, so no sequence may grow longer."""

    spec: RingSpec
    sliding: bool
    bounded: bool


def plan_layers(config: Any, max_length: int, tokens_per_step: int, kv_format: str) -> list[LayerPlan]:
    """Plan of every layer of a decoder's text config; UnsupportedError says what rings cannot serve."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name}: encoder-decoder model")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{name}: bidirectional attention")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{name}: latent attention (kv_lora_rank) keeps no keys and values")
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedError(f"{name}: layers that share the keys and values of another layer")
    # A config whose layers differ has a config for each of them.
    layers = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    types = list(getattr(config, "layer_types", None) or map(_layer_type, layers))
    plans = []
    for index, (layer_type, layer) in enumerate(zip(types, layers, strict=True)):
        if layer_type not in ("sliding_attention", "full_attention"):
            raise UnsupportedError(f"{name}: layer {index} is {layer_type!r}; rings serve sliding and full attention")
        sliding = layer_type == "sliding_attention"
        seen = layer.sliding_window if sliding else max_length
        require(isinstance(seen, int) and seen >= 1, "sliding_window", seen, "an integer of at least 1")
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        spec = RingSpec(
            window=min(seen, max_length),
            tokens_per_step=tokens_per_step,
            head_dim=head_dim,
            num_kv_heads=getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            v_head_dim=getattr(layer, "v_head_dim", None) or head_dim,
            kv_format=kv_format,
        )
        plans.append(LayerPlan(spec, sliding, bounded=not sliding or seen > max_length))
    return plans


def _layer_type(config: Any) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    return "full_attention" if getattr(config, "attention_chunk_size", None) is None else "chunked_attention"
