"""transformers models as `SlotModel`s: rings over many slots, tokens of several sequences packed into one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from swa_inductor.errors import UnsupportedError, require
from swa_inductor.integrations._layers import RingLayer, cache_kwarg, plan_model, switch
from swa_inductor.integrations._mask import IMPLEMENTATION
from swa_inductor.integrations._state import NewTokens, SlotState
from swa_inductor.metadata import DecodeMetadata, PrefillMetadata
from swa_inductor.state import StateLayout


class SlotCache(Cache):
    """A transformers `Cache` of rings over slots, which `TransformersSlotModel` makes and uses.

    Attributes:
        layout: where the ring of each layer lies in a slot.
        rings: uint8 [num_slots, layout.slot_bytes], the state of all slots.
    """

    layers: list[RingLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[RingLayer], layout: StateLayout, rings: Tensor, state: SlotState) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.layout, self.rings, self.state = layout, rings, state

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a SlotCache knows no sequences: slots are given and taken by who runs the model")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


class TransformersSlotModel(torch.nn.Module):
    """A `SlotModel` of a transformers model, which is switched to the attention implementation "swa_ring".

    Sliding layers hold W + D records per slot, full-attention layers max_length + D.

    Args:
        model: a decoder of sliding and full attention layers with a head for tokens, on one device;
            `swa_inductor.integrations.transformers.use_stock` switches it back.
        num_slots, max_length: see `SlotModel`.
        tokens_per_step: tokens of a sequence in a decode step (D).
        kv_format: record format, 'mxfp8', 'bf16', 'fp16' or 'fp32'; 'auto' is that of the model's dtype.

    Attributes:
        model, cache, and those of `SlotModel`.

    Raises:
        UnsupportedError: a layer type or model that rings cannot serve.
        InvalidArgumentError: an argument out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_length: int,
        tokens_per_step: int,
        kv_format: str = "auto",
    ) -> None:
        super().__init__()
        plans, self.device = plan_model(model, max_length, tokens_per_step, kv_format)
        self.model, self.num_slots, self.max_length = model, num_slots, max_length
        self.spec = min((plan.spec for plan in plans), key=lambda spec: spec.window)
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        layout, state = StateLayout([plan.spec for plan in plans]), SlotState()
        with torch.inference_mode(False):  # inference tensors could not be written outside of it
            rings = layout.allocate(num_slots, self.device)
        layers = [
            RingLayer(plan, state, layout.stored_view(rings, i), i, i == len(plans) - 1) for i, plan in enumerate(plans)
        ]
        self.cache = SlotCache(layers, layout, rings, state)
        self._cache_kwarg = cache_kwarg(model)
        switch(model, IMPLEMENTATION)

    @property
    def state_bytes(self) -> int:
        """Bytes of the rings of all slots and layers."""
        return self.cache.rings.numel()

    def full_kv_bytes(self, tokens: int) -> int:
        """See `SlotModel`."""
        return tokens * sum(layer.spec.num_kv_heads * layer.spec.record_bytes for layer in self.cache.layers)

    def decode(self, tokens: Tensor, metadata: DecodeMetadata) -> Tensor:
        """See `SlotModel`."""
        m = metadata
        new = NewTokens(m.state_ids, m.positions, m.positions, m.valid_start, self.spec.tokens_per_step)
        return self._forward(tokens, new, 0)

    def prefill(self, tokens: Tensor, metadata: PrefillMetadata, last: Tensor) -> Tensor:
        """See `SlotModel`. Uncompiled, it reads the state ids on the host, and is much faster on a CPU for that."""
        m = metadata
        return self._forward(tokens, NewTokens(m.state_ids, m.positions, m.q_starts, m.valid_start, None), last)

    def _forward(self, tokens: Tensor, new: NewTokens, keep: Tensor | int) -> Tensor:
        """Logits of all tokens (keep 0) or of some."""
        require(tokens.dtype == torch.int64, "tokens dtype", tokens.dtype, "torch.int64")
        self.cache.state.tokens = new
        logits = self.model(
            input_ids=tokens[None],
            position_ids=new.positions[None],
            attention_mask=new.positions[None, None, None],  # 4-D: transformers passes it on as it is
            logits_to_keep=keep,
            **{self._cache_kwarg: self.cache},
        ).logits
        self.cache.state.tokens = None
        return logits[0]
