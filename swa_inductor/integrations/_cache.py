"""`RingCache`, a transformers `Cache` whose layers are rings, one per sequence."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from swa_inductor.errors import UnsupportedError, require
from swa_inductor.integrations._layers import RingLayer, plan_model, switch
from swa_inductor.integrations._mask import IMPLEMENTATION, QueryOffset
from swa_inductor.integrations._state import RingState


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

    def __init__(self, layers: list[RingLayer], state: RingState) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.state = state

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
        require(isinstance(batch_size, int) and batch_size >= 1, "batch_size", batch_size, "an integer of at least 1")
        plans, device = plan_model(model, max_length, tokens_per_step, kv_format)
        limit = max_length if any(plan.bounded for plan in plans) else None
        shortest = min((plan.spec for plan in plans), key=lambda spec: spec.window)
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            state = RingState(batch_size, limit, shortest, device)
            layers, last = [], len(plans) - 1
            for index, plan in enumerate(plans):
                ring = torch.zeros(plan.spec.cache_shape(batch_size), dtype=torch.uint8, device=device)
                torch._dynamo.mark_static_address(ring)
                layers.append(RingLayer(plan, state, ring, index, index == last))
            cache = cls(layers, state)
        switch(model, IMPLEMENTATION)
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
            f"more than R={state.shortest.rows} (W={state.shortest.window}); a larger tokens_per_step allows more",
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence b the one that `beam_idx[b]` was, int64 [B], as beam search asks. Copies rings, in place."""
        for t in (self.state.lengths, self.state.high_water, *(layer.ring for layer in self.layers)):
            t.copy_(t.index_select(0, beam_idx))

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("a RingCache keeps its sequences in place: no change of the batch")

    batch_repeat_interleave = batch_select_indices = _refuse  # type: ignore[assignment]
