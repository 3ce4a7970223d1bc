"""Ring caches for transformers (5.17 and later): `RingCache`, a `Cache` whose layers are rings, and its attention.

`RingCache.from_model` allocates the rings and switches the model to the attention implementation "swa_ring". From then
on three things travel through the unchanged model code:

- `RingLayer.update` hands the new keys and values on as one `NewKV`, which only our attention function can take;
- the "attention mask" is the ring position of every new token, int64 [B, 1, 1, q_len], -1 for padding;
- the attention function stores and attends, and the last layer advances the lengths, on the device and in place.

No Python number changes from step to step, so a compiled decode step compiles once and is one CUDA graph.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from swa_inductor import api, records
from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.integrations._geometry import LayerPlan, plan_layers
from swa_inductor.integrations._mask import IMPLEMENTATION, QueryOffset, raise_other_implementation, ring_positions
from swa_inductor.integrations._prefill import attend_new, token_rows
from swa_inductor.integrations._state import RingState

_OTHER_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_bias", "indices", "block_indices", "sinks")
"""Arguments of attention functions that change what is computed, in ways rings do not serve."""


class NewKV(NamedTuple):
    """What a model passes on as its keys and values: the new ones only, and the layer that holds the others."""

    layer: RingLayer
    k: Tensor
    v: Tensor

    def __getattr__(self, name: str) -> Any:
        """Raise what says the cause, where another attention function takes this for a tensor."""
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise_other_implementation(f"{name!r} of the keys or values")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class RingLayer(CacheLayerMixin):
    """The ring of layer `index`: `ring`, uint8 [B, R, H_kv, record_bytes]. `last` marks the last layer of the model."""

    is_compileable = True
    is_croppable = True

    def __init__(self, plan: LayerPlan, state: RingState, index: int, last: bool) -> None:
        super().__init__()
        self.plan, self.spec, self.state, self.index, self.last = plan, plan.spec, state, index, last
        self.is_sliding = plan.sliding
        self.batch_size = state.slots.shape[0]
        self.ring = torch.zeros(plan.spec.cache_shape(self.batch_size), dtype=torch.uint8, device=state.slots.device)
        torch._dynamo.mark_static_address(self.ring)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a compiled step needs its tensors, at fixed addresses, before it is traced."""

    def update(  # type: ignore[override]  # a NewKV, so that no other attention function can use it
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[NewKV, NewKV]:
        """Take the new key_states [B, H_kv, q_len, D] and value_states [B, H_kv, q_len, Dv] along. Writes nothing."""
        got, wanted = key_states.shape[0], self.batch_size
        require(got == wanted, "batch size", got, f"{wanted}, what the RingCache was built for")
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
        raise UnsupportedError("a RingLayer is part of a RingCache: reset or crop that; no beam search, no offload")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class RingCache(Cache):
    """A transformers `Cache` of rings. Build it with `from_model`.

    Sliding layers hold W + D records per sequence, whatever its length. Full-attention layers hold max_length + D; with
    such a layer a sequence that grows beyond max_length is refused: by InvalidArgumentError before anything is written,
    in compiled code by an assertion on the device. A model of sliding layers alone runs on without a limit.

    Padding, on the left or on the right of the new tokens, is never stored: it is told by a 2-D `attention_mask` over
    all tokens so far. A forward without a mask takes all its tokens for real ones. Pass `position_ids` in every forward
    of a conversation or in none. Inference only.
    """

    layers: list[RingLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[RingLayer]) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.state = layers[0].state

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        batch_size: int,
        max_length: int,
        tokens_per_step: int = 1,
        kv_format: str = "auto",
    ) -> RingCache:
        """Allocate the rings on the model's device and switch the model to the "swa_ring" attention implementation.

        Args:
            model: a decoder of sliding and full attention layers; `use_stock` switches it back.
            batch_size: sequences (B), the same in every forward.
            max_length: tokens of a sequence at most, prompt included (see the class).
            tokens_per_step: new tokens per sequence (D) up to which a forward is a decode step, which reads the rings
                in place. A longer one is a prefill.
            kv_format: record format, 'mxfp8', 'bf16', 'fp16' or 'fp32'; 'auto' is that of the model's dtype.

        Raises:
            UnsupportedError: a layer type or model that rings cannot serve.
            InvalidArgumentError: an argument out of range.
        """
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            require(isinstance(value, int) and value >= 1, name, value, "an integer of at least 1")
        devices = {p.device for p in model.parameters()}
        if len(devices) != 1:
            raise UnsupportedError(f"a model on {sorted(map(str, devices))}: a RingCache lives on one device")
        if kv_format == "auto":
            formats = {dtype: name for name, dtype in records.RAW_DTYPES.items()}
            require(model.dtype in formats, "kv_format", f"'auto' for a model in {model.dtype}", "an explicit format")
            kv_format = formats[model.dtype]
        plans = plan_layers(model, max_length, tokens_per_step, kv_format)
        limit = max_length if any(plan.bounded for plan in plans) else None
        shortest = min((plan.spec for plan in plans), key=lambda spec: spec.window)
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            state = RingState(batch_size, limit, shortest, devices.pop())
            last = len(plans) - 1
            cache = cls([RingLayer(plan, state, index, index == last) for index, plan in enumerate(plans)])
        _switch(model, IMPLEMENTATION)
        return cache

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for the rings."""
        return sum(layer.ring.numel() for layer in self.layers)

    def get_query_offset(self, layer_idx: int = 0) -> QueryOffset:  # type: ignore[override]
        """Ring position of the next token of each sequence; transformers hands it to `ring_positions`."""
        return QueryOffset(self.state.lengths)

    def reset(self) -> None:
        """Forget all sequences, in place. The rings keep their bytes, which nothing reads any more."""
        for t in (self.state.lengths, self.state.high_water, self.state.columns):
            t.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens of every sequence back; 0 does nothing. Synchronises.

        Exact, or refused: the rings must still hold what the next token sees. They do until the first one has wrapped,
        then up to `RingSpec.max_rollback` tokens below the last position ever written.

        Raises:
            InvalidArgumentError: a positive number, more tokens than a sequence holds, or records already overwritten.
        """
        state, remove = self.state, -int(tokens_to_remove)
        require(remove >= 0, "tokens_to_remove", tokens_to_remove, "0 or negative, minus the number of tokens")
        if remove == 0:
            return
        left = state.lengths - remove
        require(
            int(left.min()) >= 0,
            "tokens_to_remove",
            tokens_to_remove,
            f"down to {-int(state.lengths.min())}, minus the tokens of the shortest sequence",
        )
        require(
            bool(state.intact(left)),
            "tokens_to_remove",
            f"{tokens_to_remove}, back to {left.tolist()} tokens",
            f"at most {state.shortest.max_rollback} tokens below the {state.high_water.tolist()} written, if those are "
            f"more than R={state.shortest.rows} (W={state.shortest.window})",
        )
        state.lengths.copy_(left)
        state.columns.sub_(remove)

    def export_prefix(self, row: int) -> dict[str, Any]:
        """Copy of one sequence on the host, with which `import_prefix` goes on in a RingCache of the same geometry.

        It holds plain values and tensors, so `torch.save` and `torch.load(weights_only=True)` serve. Synchronises.

        Args:
            row: the sequence, 0 to B - 1.

        Returns:
            'geometry', the fields of the RingSpec of every layer; 'length', 'high_water' and 'columns' as in RingState;
            'rings', for every layer the rows written so far, uint8 [min(R, high_water), H_kv, record_bytes].

        Raises:
            InvalidArgumentError: no such row.
        """
        self._check_row(row)
        written = int(self.state.high_water[row])
        return {
            "geometry": self._geometry(),
            "length": int(self.state.lengths[row]),
            "high_water": written,
            "columns": int(self.state.columns),
            "rings": [layer.ring[row, : min(layer.spec.rows, written)].to("cpu", copy=True) for layer in self.layers],
        }

    def import_prefix(self, row: int, prefix: dict[str, Any]) -> None:
        """Make sequence `row` the one that `export_prefix` copied, in place; the other sequences stay as they are.

        The model must be the same one: that is not checked. Sequences that have come differently far take what padded
        ones do, an `attention_mask`, as if all of them were padded to the longest, and `position_ids`.

        Args:
            row: the sequence, 0 to B - 1.
            prefix: what `export_prefix` returned, of any row.

        Raises:
            InvalidArgumentError: no such row, or a prefix from a RingCache of another geometry, naming what differs.
        """
        self._check_row(row)
        got, own = prefix["geometry"], self._geometry()
        require(len(got) == len(own), "prefix layers", len(got), f"{len(own)}, those of this RingCache")
        for index, (theirs, ours) in enumerate(zip(got, own, strict=True)):
            differ = [name for name in ours if theirs.get(name) != ours[name]]
            require(
                not differ,
                f"prefix geometry of layer {index}",
                ", ".join(f"{name}={theirs.get(name)!r}" for name in differ),
                ", ".join(f"{name}={ours[name]!r}" for name in differ) + ", as in this RingCache",
            )
        for layer, ring in zip(self.layers, prefix["rings"], strict=True):
            layer.ring[row, : ring.shape[0]].copy_(ring)
        self.state.lengths[row] = prefix["length"]
        self.state.high_water[row] = prefix["high_water"]
        self.state.columns.clamp_(min=prefix["columns"])

    def _geometry(self) -> list[dict[str, Any]]:
        return [asdict(layer.spec) for layer in self.layers]

    def _check_row(self, row: int) -> None:
        require(0 <= row < self.batch_size, "row", row, f"0 to {self.batch_size - 1}")

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a RingCache keeps its sequences in place: no beam search, no change of the batch")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


def cache_kwarg(model: torch.nn.Module) -> str:
    """Name under which `model` takes its cache: 'cache' (transformers 5.24 and later) or 'past_key_values'."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedError(f"{type(model).__name__}.forward takes no cache")


def use_stock(model: PreTrainedModel) -> None:
    """Give the model the attention implementation back that it had before `RingCache.from_model`."""
    former = model.__dict__.pop("_swa_former_implementation", None)
    if former is not None:
        _switch(model, former)


def _switch(model: PreTrainedModel, implementation: str) -> None:
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


# ---------------------------------------------------------------------------------------------------- attention


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
    scale = spec.head_dim**-0.5 if scaling is None else scaling
    options: dict[str, Any] = {"spec": spec, "scale": scale, "softcap": softcap, "sinks": s_aux}
    state_ids = torch.where(positions >= 0, state.slots[:, None], -1).flatten()
    if q_len <= spec.tokens_per_step:
        api.store(token_rows(k), token_rows(v), layer.ring, state_ids, positions.flatten(), spec=spec)
        rows = api.attention(
            token_rows(query), layer.ring, state_ids, positions.flatten(), tokens_per_step=q_len, **options
        )
        assert isinstance(rows, Tensor)  # no lse was asked for
        out = rows.unflatten(0, (batch, q_len))
    else:
        out = attend_new(query, k, v, layer.ring, state, state_ids, positions, **options)
        api.store(token_rows(k), token_rows(v), layer.ring, state_ids, positions.flatten(), spec=spec)
    if layer.last:
        state.advance(positions)
    return out, None


AttentionInterface.register(IMPLEMENTATION, ring_attention)
AttentionMaskInterface.register(IMPLEMENTATION, ring_positions)
