"""Layers of ring caches for transformers, and the attention implementation "swa_ring" that they need.

Three things travel through the unchanged model code:

- `RingLayer.update` hands the new keys and values on as one `NewKV`, which only our attention function can take;
- the "attention mask" is the ring position of every new token, int64 [B, 1, 1, q_len];
- the attention function asks the state of the cache for the slots of the new tokens, stores and attends.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from swa_inductor import api, api_store, records
from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.integrations._geometry import LayerPlan, plan_layers
from swa_inductor.integrations._mask import IMPLEMENTATION, raise_other_implementation, ring_positions
from swa_inductor.integrations._prefill import attend_new, kv_rows, token_rows
from swa_inductor.integrations._state import RingState, SlotState

_OTHER_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_bias", "indices", "block_indices", "sinks")
"""Arguments of attention functions that change what is computed, in ways rings do not serve."""


class NewKV(NamedTuple):
    """What a model passes on as its keys and values: the new ones only, and the layer that holds the others."""

    layer: RingLayer
    k: Tensor
    v: Tensor

    def __getattr__(self, name: str) -> Any:
        """Raise what says the cause, where another attention function takes this for a tensor."""
        if name == "shape" and self.layer.spec.shared_kv:
            return self.k.shape  # DeepSeek-V4 asks whether compressed keys stand behind these
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise_other_implementation(f"{name!r} of the keys or values")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class RingLayer(CacheLayerMixin):
    """The rings of layer `index`: `ring`, uint8 [slots, R, H_kv, record_bytes]. `last` marks the last layer."""

    is_compileable = True
    is_croppable = True

    def __init__(self, plan: LayerPlan, state: RingState | SlotState, ring: Tensor, index: int, last: bool) -> None:
        super().__init__()
        self.plan, self.spec, self.state, self.ring, self.index, self.last = plan, plan.spec, state, ring, index, last
        self.is_sliding, self.batch_size = plan.sliding, state.batch_size
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a compiled step needs its tensors, at fixed addresses, before it is traced."""

    def update(  # type: ignore[override]  # a NewKV, so that no other attention function can use it
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[NewKV, NewKV]:
        """Take the new key_states [B, H_kv, q_len, D] and value_states [B, H_kv, q_len, Dv] along. Writes nothing."""
        got, wanted = key_states.shape[0], self.batch_size
        require(got == wanted, "batch size", got, f"{wanted}, what the cache was built for")
        if self.spec.shared_kv and key_states is not value_states:
            raise UnsupportedError(f"layer {self.index}: one projection makes keys and values, which are not the same")
        new = NewKV(self, key_states, value_states)
        return new, new

    def get_seq_length(self) -> Tensor:  # type: ignore[override]  # as in StaticLayer: an int would recompile
        """int64 []: tokens per sequence the model was given, padding counted, as transformers counts positions."""
        return self.state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[Tensor, int]:  # type: ignore[override]
        """Columns of a padding mask over history and new tokens, and their offset."""
        return self.state.columns + query_length, 0

    def get_max_length(self) -> int:
        """Tokens of a sequence at most, -1 for no limit."""
        return self.spec.window if self.plan.bounded else -1

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a RingLayer is part of a RingCache or SlotCache: use that; no offload")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


def plan_model(
    model: PreTrainedModel, max_length: int, tokens_per_step: int, kv_format: str
) -> tuple[list[LayerPlan], torch.device]:
    """Rings of the layers of a model, and its device; 'auto' is the record format of its dtype."""
    require(isinstance(max_length, int) and max_length >= 1, "max_length", max_length, "an integer of at least 1")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedError(f"a model on {sorted(map(str, devices))}: a cache of rings lives on one device")
    return plan_layers(model, max_length, tokens_per_step, record_format(model, kv_format)), devices.pop()


def record_format(model: PreTrainedModel, kv_format: str) -> str:
    """`kv_format`, 'auto' replaced by the format of the model's dtype."""
    if kv_format != "auto":
        return kv_format
    formats = {dtype: name for name, dtype in records.RAW_DTYPES.items()}
    require(model.dtype in formats, "kv_format", f"'auto' for a model in {model.dtype}", "an explicit format")
    return formats[model.dtype]


def cache_kwarg(model: torch.nn.Module) -> str:
    """Name under which `model` takes its cache: 'cache' (transformers 5.24 and later) or 'past_key_values'."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedError(f"{type(model).__name__}.forward takes no cache")


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation of the decoder of a model; `use_stock` finds the one it had before."""
    config = model.config
    text = config.get_text_config(decoder=True)
    former = text._attn_implementation
    # The other parts of a composite model (a vision tower, say) keep what they have.
    part = next((name for name in config.sub_configs if getattr(config, name) is text), None)
    model.set_attn_implementation(implementation if part is None else {part: implementation})
    if text._attn_implementation != implementation:
        raise UnsupportedError(f"{type(model).__name__} does not let its attention implementation be set")
    if implementation == IMPLEMENTATION != former:
        model._swa_former_implementation = former


def use_stock(model: PreTrainedModel) -> None:
    """Give the model the attention implementation back that it had before `RingCache.from_model`."""
    former = model.__dict__.pop("_swa_former_implementation", None)
    if former is not None:
        switch(model, former)


def ring_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: NewKV,
    value: NewKV,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [B, H, q_len, D] -> out [B, q_len, H, Dv]; writes the new keys and values.

    Args:
        key: what `RingLayer.update` returned.
        attention_mask: what `ring_positions` returned.
        softcap: soft-cap of the logits. s_aux: [H], attention sinks.

    Raises:
        InvalidArgumentError: another cache, or none. UnsupportedError: a mask of the caller's own, dropout, training.
    """
    if not isinstance(key, NewKV):
        raise InvalidArgumentError(
            f"cache: got none or no RingCache; allowed: the RingCache of this model ({IMPLEMENTATION!r} needs one)"
        )
    layer, k, v = key
    spec, state = layer.spec, layer.state
    batch, _, q_len, _ = query.shape
    if attention_mask is None or attention_mask.dtype != torch.int64 or attention_mask.shape != (batch, 1, 1, q_len):
        raise UnsupportedError("attention_mask: a RingCache takes none or a 2-D padding mask, no custom 4-D mask")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedError("bidirectional attention")
    if dropout != 0 or (torch.is_grad_enabled() and query.requires_grad):
        raise UnsupportedError("training: a RingCache is for inference, under torch.no_grad() and without dropout")
    # The mask holds no window: what the module says, which is all that flash attention sees, must be what was planned.
    if not layer.is_sliding:
        require(sliding_window is None, "sliding_window", sliding_window, "None in a full-attention layer")
    else:
        seen = min(sliding_window or 0, spec.window) if layer.plan.bounded else sliding_window
        require(seen == spec.window, "sliding_window", sliding_window, f"{spec.window}, as in the config")
    if any(kwargs.get(name) is not None for name in _OTHER_ATTENTION):
        raise UnsupportedError(f"attention with one of {', '.join(_OTHER_ATTENTION)}")
    positions = attention_mask[:, 0, 0]
    if layer.index == 0:
        state.begin(positions)
    new = state.new_tokens(positions)
    scale = spec.head_dim**-0.5 if scaling is None else scaling
    options: dict[str, Any] = {"spec": spec, "scale": scale, "softcap": softcap, "sinks": s_aux}
    if new.decode is not None:
        api_store.store(*kv_rows(k, v, spec), layer.ring, new.state_ids, new.positions, spec=spec)
        rows = api.attention(
            token_rows(query),
            layer.ring,
            new.state_ids,
            new.positions,
            valid_start=new.valid_start,
            tokens_per_step=new.decode,
            **options,
        )
        assert isinstance(rows, Tensor)  # no lse was asked for
        out = rows.unflatten(0, (batch, q_len))
    else:
        out = attend_new(query, k, v, layer.ring, state, new, positions, **options)
        api_store.store(*kv_rows(k, v, spec), layer.ring, new.state_ids, new.positions, spec=spec)
    if layer.last:
        state.advance(positions)
    return out, None


AttentionInterface.register(IMPLEMENTATION, ring_attention)
AttentionMaskInterface.register(IMPLEMENTATION, ring_positions)
