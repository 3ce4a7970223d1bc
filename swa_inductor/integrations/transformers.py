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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from swa_inductor import api, records
from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.integrations._geometry import LayerPlan, plan_layers
from swa_inductor.integrations._prefill import prefill_attention
from swa_inductor.spec import RingSpec

IMPLEMENTATION = "swa_ring"
"""Name of the attention implementation and of the mask function that belongs to it."""

_OTHER_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_bias", "indices", "block_indices", "sinks")
"""Arguments of attention functions that change what is computed, in ways rings do not serve."""


class NewKV(NamedTuple):
    """What a model passes on as its keys and values: the new ones only, and the layer that holds the others."""

    layer: RingLayer
    k: Tensor
    v: Tensor


class RingState:
    """What the layers of a cache share: how far its sequences have come, in tensors that keep their address.

    lengths: int64 [B], tokens of each sequence, padding not counted.
    high_water: int64 [B], one more than the last position ever written.
    columns: int64 [], tokens per sequence that the model was given, padding counted.
    slots: int32 [B], 0 to B - 1.
    limit: tokens that a sequence may hold, None for no limit.
    shortest: the ring with the smallest window: as R = W + D in all of them, it is the first to lose what is needed.
    """

    def __init__(self, batch_size: int, limit: int | None, shortest: RingSpec, device: torch.device) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.high_water = torch.zeros_like(self.lengths)
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.slots = torch.arange(batch_size, dtype=torch.int32, device=device)
        self.limit, self.shortest = limit, shortest
        for t in (self.lengths, self.high_water, self.columns, self.slots):
            torch._dynamo.mark_static_address(t)

    def intact(self, lengths: Tensor) -> Tensor:
        """bool []: sequences of these lengths, int64 [B], can go on: no record that is still seen is overwritten."""
        oldest = (lengths - self.shortest.window + 1).clamp(min=0)
        return (oldest + self.shortest.rows >= self.high_water).all()

    def begin(self, positions: Tensor) -> None:
        """Check the new positions, int64 [B, q_len], -1 for padding, before the first layer writes.

        They must go on from `lengths`, which a mask that was made for another forward does not, and stay below the
        limit. The rings must be intact, which they may not be after a forward that broke off.
        """
        first = torch.where(positions >= 0, positions, self.lengths[:, None]).amin(1)
        ok = (first == self.lengths).all() & self.intact(self.lengths)
        if self.limit is not None:
            ok = ok & (positions < self.limit).all()
        _require_on_device(
            ok,
            "positions of the new tokens",
            lambda: f"{first.tolist()} to {positions.amax(1).tolist()}",
            lambda: (
                f"from {self.lengths.tolist()} on, below max_length={self.limit}, in rings not overwritten since "
                f"({self.high_water.tolist()} tokens written)"
            ),
        )
        self.high_water.copy_(torch.maximum(self.high_water, positions.amax(1) + 1))

    def advance(self, positions: Tensor) -> None:
        """Count the new tokens, after the last layer."""
        self.lengths.copy_(torch.maximum(self.lengths, positions.amax(1) + 1))
        self.columns.add_(positions.shape[1])


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
        plans = plan_layers(model.config.get_text_config(decoder=True), max_length, tokens_per_step, kv_format)
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

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """int64 [B]: ring position of the next token of each sequence; transformers hands it to `ring_positions`."""
        return self.state.lengths

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


# ---------------------------------------------------------------------------------------------------- mask


def ring_positions(
    batch_size: int,
    q_length: int,
    kv_length: Tensor,
    q_offset: Tensor,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The mask function: int64 [B, 1, 1, q_len], ring position of every new token, -1 for padding.

    4-D, because transformers passes a 4-D mask on as it is, also where `generate` has prepared it beforehand.

    Args:
        kv_length: int64 [], columns of history and new tokens (`RingCache.get_mask_sizes`).
        q_offset: int64 [B], tokens of each sequence so far (`RingCache.get_query_offset`).
        attention_mask: bool [B, columns or more], False for padding.

    Raises:
        UnsupportedError: a mask that is not causal or sliding-window causal.
        InvalidArgumentError: another cache or none, another batch size, or a padding mask that does not fit.
    """
    if not (isinstance(q_offset, Tensor) and q_offset.dim() == 1):
        raise InvalidArgumentError(f"cache: got none or no RingCache; allowed: a RingCache, with {IMPLEMENTATION!r}")
    # Overlays of the caller come with `use_vmap`, blocks as or_masks, and only bidirectional masks may be skipped so.
    plain = mask_function is causal_mask_function or (local_size is not None and mask_function.__name__ == "and_mask")
    if use_vmap or not plain or "allow_is_bidirectional_skip" in kwargs:
        raise UnsupportedError(
            "a mask that is not plainly causal or sliding (overlay, blocks, bidirectional): rings cannot serve it"
        )
    require(q_offset.shape[0] == batch_size, "batch size", batch_size, f"{q_offset.shape[0]}, that of the RingCache")
    new = torch.arange(q_length, device=q_offset.device)
    if attention_mask is None:
        return (q_offset[:, None] + new)[:, None, None]
    require(
        attention_mask.dim() == 2 and attention_mask.shape[0] == batch_size,
        "attention_mask shape",
        tuple(attention_mask.shape),
        f"[{batch_size}, tokens so far, the new ones included]",
    )
    start = kv_length - q_length
    _check_padding(attention_mask, start, q_length, q_offset)
    real = attention_mask.index_select(1, start + new)
    return torch.where(real, q_offset[:, None] + real.cumsum(1) - 1, -1)[:, None, None]


def _check_padding(mask: Tensor, start: Tensor, q_length: int, lengths: Tensor) -> None:
    """A mask, bool [B, columns], reaches the last token, has the history as stored, and pads only at the ends."""
    column = torch.arange(mask.shape[1], device=mask.device)
    history = (mask & (column < start)).sum(1)
    new = mask & (column >= start) & (column < start + q_length)
    runs = (new.int().diff(dim=1, prepend=torch.zeros_like(new[:, :1], dtype=torch.int32)) > 0).sum(1)
    _require_on_device(
        (history == lengths).all() & (runs <= 1).all() & (start + q_length <= mask.shape[1]),
        "attention_mask",
        lambda: f"{mask.shape[1]} columns, {history.tolist()} tokens of history, {runs.tolist()} runs of new tokens",
        lambda: f"{int(start) + q_length} columns or more, {lengths.tolist()} tokens of history, one run at most",
    )


def _require_on_device(ok: Tensor, name: str, got: Callable[[], str], allowed: Callable[[], str]) -> None:
    """`require` for a condition that is a tensor: an assertion on the device where the host must not wait for it."""
    if _may_sync(ok):
        if not ok:
            raise InvalidArgumentError(f"{name}: got {got()}; allowed: {allowed()}")
    else:
        torch._assert_async(ok, f"{name} of a RingCache is not allowed; run the forward uncompiled to see why")


def _may_sync(t: Tensor) -> bool:
    """Whether values may be read on the host: neither in a trace nor in a CUDA graph capture."""
    return not torch.compiler.is_compiling() and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


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
    if layer.is_sliding and sliding_window is not None:
        window = min(sliding_window, spec.window) if layer.plan.bounded else sliding_window
        require(window == spec.window, "sliding_window", sliding_window, f"{spec.window}, as in the config")
    if any(kwargs.get(name) is not None for name in _OTHER_ATTENTION):
        raise UnsupportedError(f"attention with one of {', '.join(_OTHER_ATTENTION)}")
    positions = attention_mask[:, 0, 0]
    if layer.index == 0:
        state.begin(positions)
    scale = spec.head_dim**-0.5 if scaling is None else scaling
    options: dict[str, Any] = {"spec": spec, "scale": scale, "softcap": softcap, "sinks": s_aux}
    state_ids = torch.where(positions >= 0, state.slots[:, None], -1).flatten()
    if q_len <= spec.tokens_per_step:
        api.store(_rows(k), _rows(v), layer.ring, state_ids, positions.flatten(), spec=spec)
        rows = api.attention(_rows(query), layer.ring, state_ids, positions.flatten(), tokens_per_step=q_len, **options)
        assert isinstance(rows, Tensor)  # no lse was asked for
        out = rows.unflatten(0, (batch, q_len))
    else:
        # At most window - 1 tokens are seen; on the host, a fresh prompt is known to have none.
        history = min(spec.window - 1, int(state.lengths.max()) if _may_sync(query) else spec.window)
        out = prefill_attention(query, k, v, layer.ring, state.lengths, positions, history=history, **options)
        api.store(_rows(k), _rows(v), layer.ring, state_ids, positions.flatten(), spec=spec)
    if layer.last:
        state.advance(positions)
    return out, None


def _rows(x: Tensor) -> Tensor:
    """[B, H, q_len, D] -> [T, H, D], the tokens of a sequence together."""
    return x.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(IMPLEMENTATION, ring_attention)
AttentionMaskInterface.register(IMPLEMENTATION, ring_positions)
