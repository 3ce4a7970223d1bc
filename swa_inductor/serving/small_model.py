"""A small decoder written with the public ops: an example, and a model to check serving with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swa_inductor import api, api_store, records
from swa_inductor.banded import packed_attention
from swa_inductor.metadata import DecodeMetadata, PrefillMetadata
from swa_inductor.spec import RingSpec
from swa_inductor.state import StateLayout

_BAND = 128
"""Queries at a time in plain torch: more of them waste work on the corners of the band."""


class Layer(nn.Module):
    """Attention over a ring, then an MLP, each behind an RMSNorm and with a residual."""

    def __init__(self, hidden: int, heads: int, spec: RingSpec, sinks: bool) -> None:
        super().__init__()
        dim, kv_heads = spec.head_dim, spec.num_kv_heads
        self.spec, self.heads = spec, [heads, kv_heads, kv_heads]  # of q, k and v
        self.qkv = nn.Linear(hidden, sum(self.heads) * dim, bias=False)
        self.out = nn.Linear(heads * dim, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Linear(4 * hidden, hidden))
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, H_kv, D] of new tokens, fp32 unless x is in half precision."""
        q, k, v = self.qkv(_norm(x)).unflatten(-1, (-1, self.spec.head_dim)).split(self.heads, 1)
        dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
        return _rotate(q, positions).to(dtype), _rotate(k, positions).to(dtype), v.to(dtype)

    def options(self, valid_start: Tensor) -> dict[str, Any]:
        """What both kinds of attention take alike."""
        sinks = None if self.sinks is None else self.sinks.float()
        return {"spec": self.spec, "valid_start": valid_start, "sinks": sinks}

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, from its input and the output of attention [T, H, D]."""
        x = x + self.out(attended.flatten(1).to(x.dtype))
        return x + self.mlp(_norm(x))

    def decode(self, x: Tensor, cache: Tensor, metadata: DecodeMetadata) -> Tensor:
        """First write the new tokens, then attend."""
        q, k, v = self.project(x, metadata.positions)
        where = (cache, metadata.state_ids, metadata.positions)
        api_store.store(k, v, *where, spec=self.spec)
        depth = self.spec.tokens_per_step
        attended = api.attention(q, *where, tokens_per_step=depth, **self.options(metadata.valid_start))
        assert isinstance(attended, Tensor)  # no lse was asked for
        return self.finish(x, attended)

    def prefill(self, x: Tensor, cache: Tensor, metadata: PrefillMetadata) -> Tensor:
        """First attend, to keys and values as they will be read back, then write the new tokens."""
        q, k, v = self.project(x, metadata.positions)
        m, options = metadata, self.options(metadata.valid_start)
        where = (cache, m.state_ids, m.positions)
        attended: Any
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            scale = self.spec.head_dim**-0.5
            attended = packed_attention(q, k, v, *where, m.q_starts, scale=scale, softcap=None, **options)
        else:
            nowhere = torch.full_like(m.state_ids, -1)
            back = api_store.store_cast_back(k, v, cache, nowhere, m.positions, spec=self.spec)
            attended = api.attention_prefill(q, *back, *where, m.q_starts, **options)
        api_store.store(k, v, *where, spec=self.spec)
        return self.finish(x, attended)

    def reference(self, x: Tensor) -> Tensor:
        """A whole sequence without a ring: banded causal attention in fp64."""
        count, spec = len(x), self.spec
        at = torch.arange(count, device=x.device)
        q, k, v = self.project(x, at)
        k, v = (records.round_trip(t, spec.kv_format, spec.min_amax) for t in (k, v))
        q, k, v = (t.double().repeat_interleave(self.heads[0] // t.shape[1], 1).transpose(0, 1) for t in (q, k, v))
        parts = []
        for i in range(0, count, _BAND):
            low, end = max(0, i - spec.window + 1), min(i + _BAND, count)
            distance = at[i:end, None] - at[low:end]
            hidden = (distance < 0) | (distance >= spec.window)
            scores = (q[:, i:end] @ k[:, low:end].transpose(1, 2) * spec.head_dim**-0.5).masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, end - i, 1)], 2)
            parts.append(scores.softmax(-1)[..., : end - low] @ v[:, low:end])
        return self.finish(x, torch.cat(parts, 1).transpose(0, 1))


class SmallModel(nn.Module):
    """A `SlotModel` of sliding-window layers with random weights: RMSNorm, GQA with half-split RoPE and sinks, MLP.

    Args:
        num_slots, max_length: see `SlotModel`. tokens_per_step: D.
        vocab_size, hidden, layers, heads, kv_heads, head_dim, window, kv_format: geometry; head_dim is even.
        sinks: one sink logit per query head.
        dense_dtype: of weights and activations. In fp64 (queries, keys and values are fp32) greedy tokens do not depend
            on what else is in the batch.
        seed: of the weights.
        device: where it lives.

    Raises:
        InvalidArgumentError: a ring or a number of slots out of range.
    """

    layers: list[Layer]
    state: Tensor

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        tokens_per_step: int = 1,
        vocab_size: int = 256,
        hidden: int = 64,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        window: int = 128,
        kv_format: str = "fp32",
        sinks: bool = True,
        dense_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.spec = RingSpec(window, tokens_per_step, head_dim, num_kv_heads=kv_heads, kv_format=kv_format)
        self.num_slots, self.max_length, self.vocab_size = num_slots, max_length, vocab_size
        self.device = torch.device(device)
        self.layout = StateLayout([self.spec] * layers)
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            Layer(hidden, heads, self.spec, sinks) for _ in range(layers)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                gain = 1 if parameter is self.embedding.weight else 2  # with less, tokens hardly depend on attention
                nn.init.normal_(parameter, std=gain * parameter.shape[-1] ** -0.5, generator=generator)
        self.to(self.device, dense_dtype).requires_grad_(False)
        self.register_buffer("state", self.layout.allocate(num_slots, self.device))

    @property
    def state_bytes(self) -> int:
        """Bytes of the rings of all slots and layers."""
        return self.num_slots * self.layout.slot_bytes

    def full_kv_bytes(self, tokens: int) -> int:
        """See `SlotModel`."""
        return tokens * len(self.layers) * self.spec.num_kv_heads * self.spec.record_bytes

    def decode(self, tokens: Tensor, metadata: DecodeMetadata) -> Tensor:
        """See `SlotModel`."""
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer.decode(x, self.layout.stored_view(self.state, i), metadata)
        return self.logits(x)

    def prefill(self, tokens: Tensor, metadata: PrefillMetadata, last: Tensor) -> Tensor:
        """See `SlotModel`."""
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer.prefill(x, self.layout.stored_view(self.state, i), metadata)
        return self.logits(x[last])

    def logits(self, x: Tensor) -> Tensor:
        """[T, V] from the output of the last layer; the embedding is tied."""
        return F.linear(_norm(x), self.embedding.weight)

    def reference_logits(self, tokens: list[int] | Tensor) -> Tensor:
        """Logits [n, V] of one whole sequence of n tokens without rings: banded causal attention in plain torch."""
        x = self.embedding(torch.as_tensor(tokens, device=self.device))
        for layer in self.layers:
            x = layer.reference(x)
        return self.logits(x)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [T, H, D]: column i and column i + D / 2 are one pair."""
    half = x.shape[-1] // 2
    rate = 10_000 ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[:, None, None] * rate
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
