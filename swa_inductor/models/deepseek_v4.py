"""The sliding-window attention layer of DeepSeek-V4 and V4.1.

Plain PyTorch around the public functions: no kernel, no registration, nothing that a model of one's own could not do. A
merged projection gives the low-rank query and the one vector that is both key and value; both are normalised and
rotated; new vectors go into the ring, and attention reads the last `window` of them from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from swa_inductor import api, api_store
from swa_inductor.errors import require
from swa_inductor.spec import RingSpec


@dataclass(frozen=True)
class Yarn:
    """How the layers that also attend to compressed keys stretch RoPE to long contexts.

    Pairs of dims that turn more than `beta_fast` times within the original context keep their frequency, those that
    turn less than `beta_slow` times get it divided by `factor`, and those between a mixture. Values are not rescaled.

    Args:
        factor: how much longer the context has become.
        original_positions: positions of the context before.
        beta_fast, beta_slow: full turns within the original context, beta_fast > beta_slow.

    Raises:
        InvalidArgumentError: naming the argument, what came and what is allowed.
    """

    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        require(self.factor >= 1, "factor", self.factor, "a number of at least 1")
        require(self.original_positions >= 1, "original_positions", self.original_positions, "an integer of at least 1")
        require(self.beta_slow > 0, "beta_slow", self.beta_slow, "a positive number")
        fast, slow = self.beta_fast, self.beta_slow
        require(fast > slow, "beta_fast", fast, f"a number above beta_slow={slow}")


@dataclass(frozen=True)
class SlidingLayerConfig:
    """Sizes of a sliding-window attention layer, and the format of its ring.

    Args:
        hidden_size: values of a token between layers.
        num_heads: query heads; they share one head of keys, which are the values too.
        q_lora_rank: values of the low-rank query.
        o_groups: groups of heads that the output projection treats apart at first; divides num_heads.
        o_lora_rank: values that a group is projected to.
        head_dim: values of a query or key vector.
        rope_dim: dims at the end of a vector that RoPE rotates, in adjacent pairs.
        window: keys a query sees, itself included.
        tokens_per_step: tokens of a sequence in a decode step, drafts included.
        q_norm: RMSNorm without weights for each query head: V4 has it, V4.1 does not.
        rms_eps: added to the mean square in every norm.
        rope_theta: base of RoPE.
        yarn: None in a layer without compressed keys.
        kv_format: record format of the ring.
        ring_rows: rows of the ring; default window + tokens_per_step.

    Raises:
        InvalidArgumentError: naming the argument, what came and what is allowed.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    head_dim: int = 512
    rope_dim: int = 64
    window: int = 128
    tokens_per_step: int = 1
    q_norm: bool = True
    rms_eps: float = 1e-6
    rope_theta: float = 1e4
    yarn: Yarn | None = None
    kv_format: str = "mxfp8"
    ring_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "q_lora_rank", "o_groups", "o_lora_rank", "rope_dim"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "an integer of at least 1")
        self.ring  # noqa: B018  refuses a ring that cannot be
        heads, dim = self.num_heads, self.head_dim
        require(heads % self.o_groups == 0, "o_groups", self.o_groups, f"a divisor of num_heads={heads}")
        even = self.rope_dim % 2 == 0 and dim % 2 == 0 and self.rope_dim <= dim
        require(even, "rope_dim", f"{self.rope_dim} with head_dim {dim}", "an even number up to head_dim, also even")
        require(self.rms_eps > 0, "rms_eps", self.rms_eps, "a positive number")
        require(self.rope_theta > 1, "rope_theta", self.rope_theta, "a number above 1")

    @property
    def ring(self) -> RingSpec:
        """Geometry of the layer's ring."""
        return RingSpec(
            self.window,
            self.tokens_per_step,
            self.head_dim,
            shared_kv=True,
            kv_format=self.kv_format,
            ring_rows=self.ring_rows,
        )

    def compressed(self) -> SlidingLayerConfig:
        """The same layer where compressed keys take part too: RoPE with base 1.6e5, stretched by YaRN."""
        return replace(self, rope_theta=1.6e5, yarn=Yarn())

    @classmethod
    def from_transformers(cls, config: Any, **changes: Any) -> SlidingLayerConfig:
        """That of the sliding layers of a transformers `DeepseekV4Config`; `changes` replace or add fields.

        Raises:
            InvalidArgumentError: RoPE of another kind, or values that no layer can have.
        """
        rope = config.rope_parameters["main"]
        require(rope["rope_type"] == "default", "rope_type", repr(rope["rope_type"]), "'default' in sliding layers")
        fields = {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "q_lora_rank": config.q_lora_rank,
            "o_groups": config.o_groups,
            "o_lora_rank": config.o_lora_rank,
            "head_dim": config.head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "window": config.sliding_window,
            "rms_eps": config.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
        }
        return cls(**{**fields, **changes})


V4_FLASH = SlidingLayerConfig(hidden_size=4096, num_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024)
V4_PRO = SlidingLayerConfig(hidden_size=7168, num_heads=128, q_lora_rank=1536, o_groups=16, o_lora_rank=1024)
V41_FLASH = SlidingLayerConfig(
    hidden_size=5120, num_heads=64, q_lora_rank=1280, o_groups=8, o_lora_rank=1024, q_norm=False
)


def inverse_frequencies(config: SlidingLayerConfig) -> Tensor:
    """Radians per position of each rotated pair of dims, fp32 [rope_dim / 2]."""
    dim, theta = config.rope_dim, config.rope_theta
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    yarn = config.yarn
    if yarn is None:
        return frequency

    def pair_with(turns: float) -> float:
        return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency / yarn.factor * stretched + frequency * (1 - stretched)


def rope_table(config: SlidingLayerConfig, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """cos, then sin, of every position and pair, fp32 [num_positions, rope_dim]; layers of one kind share it.

    Angles are products in fp32, as in the models' training; of a million positions the last is off by 0.06 radians.
    """
    require(num_positions >= 1, "num_positions", num_positions, "an integer of at least 1")
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    return torch.cat([angle.cos(), angle.sin()], -1).to(device)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dim; weight [dim] or None. In fp32, with one cast at the end."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that deepseek_v4_parallel has split, or all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class SlidingAttention(nn.Module):
    """Attention layer without compressed keys; its parts serve layers with them as well.

    A decode step stores its tokens and attends; a prefill attends to ring history and its own tokens and stores them
    afterwards. Padded rows (state id -1) have the output 0.

    Args:
        config: sizes.
        table: fp32 [num_positions, rope_dim] of `rope_table`; positions are below num_positions.
        cache: uint8 [num_slots, R, 1, record_bytes], the rings of this layer: a tensor of its own, which becomes a
            buffer, or none where every call brings one, such as the view of a layer in the state of a StateLayout.
        dtype, device: of the weights; those of norms and the sinks are fp32.

    Raises:
        InvalidArgumentError: a table or cache of another shape or dtype.
    """

    table: Tensor
    cache: Tensor | None

    def __init__(
        self,
        config: SlidingLayerConfig,
        table: Tensor,
        cache: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        ok = table.dtype == torch.float32 and table.dim() == 2 and table.shape[1] == config.rope_dim
        allowed = f"torch.float32 [num_positions, rope_dim={config.rope_dim}]"
        require(ok, "table", f"{table.dtype} {list(table.shape)}", allowed)
        if cache is not None:
            wanted = (cache.shape[0], *config.ring.cache_shape(1)[1:])
            ok = cache.dtype == torch.uint8 and cache.shape == wanted
            allowed = f"torch.uint8 [num_slots, {', '.join(map(str, wanted[1:]))}]"
            require(ok, "cache", f"{cache.dtype} {list(cache.shape)}", allowed)
        self.config = config
        self.spec = config.ring
        weights: dict[str, Any] = {"dtype": dtype, "device": device}
        heads, dim, groups = config.num_heads, config.head_dim, config.o_groups
        self.qkv_a = nn.Linear(config.hidden_size, config.q_lora_rank + dim, bias=False, **weights)
        self.q_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False, **weights)
        self.o_a = nn.Parameter(torch.empty(groups, config.o_lora_rank, heads * dim // groups, **weights))
        self.o_b = nn.Linear(groups * config.o_lora_rank, config.hidden_size, bias=False, **weights)
        nn.init.normal_(self.o_a, std=self.o_a.shape[2] ** -0.5)
        self.q_a_norm = nn.Parameter(torch.ones(config.q_lora_rank, device=device))
        self.kv_norm = nn.Parameter(torch.ones(dim, device=device))
        self.sinks = nn.Parameter(torch.zeros(heads, device=device))
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("cache", cache, persistent=False)

    @classmethod
    def from_transformers(
        cls, attention: Any, table: Tensor, cache: Tensor | None = None, **changes: Any
    ) -> SlidingAttention:
        """Weights and sizes of a transformers `DeepseekV4Attention` of a sliding layer.

        Args:
            attention: the module; its weights are copied, in their dtype and on their device.
            table, cache: as for the class.
            changes: fields of the config that transformers does not know, such as kv_format and tokens_per_step.

        Raises:
            InvalidArgumentError: a layer with compressed keys, or as the classes raise.
        """
        kind = attention.layer_type
        require(kind == "sliding_attention", "layer_type", repr(kind), "'sliding_attention', without compressed keys")
        config = SlidingLayerConfig.from_transformers(attention.config, **changes)
        weight = attention.q_b_proj.weight
        layer = cls(config, table, cache, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            layer.qkv_a.weight.copy_(torch.cat([attention.q_a_proj.weight, attention.kv_proj.weight]))
            layer.q_b.weight.copy_(weight)
            layer.o_a.copy_(attention.o_a_proj.weight.view_as(layer.o_a))
            layer.o_b.weight.copy_(attention.o_b_proj.weight)
            layer.q_a_norm.copy_(attention.q_a_norm.weight)
            layer.kv_norm.copy_(attention.kv_norm.weight)
            layer.sinks.copy_(attention.sinks)
        return layer

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden_size] -> q_a [T, q_lora_rank] and kv [T, 1, head_dim], not yet normalised or rotated."""
        q_a, kv = self.qkv_a(x).split([self.config.q_lora_rank, self.config.head_dim], -1)
        return q_a, kv[:, None]

    def queries(self, q_a: Tensor) -> Tensor:
        """q_a [T, q_lora_rank], normalised -> q [T, num_heads, head_dim], not yet normalised or rotated."""
        return self.q_b(q_a).unflatten(-1, (-1, self.config.head_dim))

    def output(self, out: Tensor) -> Tensor:
        """Attention output [T, num_heads, head_dim], turned back -> [T, hidden_size]."""
        o_a = local(self.o_a)
        groups = out.flatten(1).unflatten(1, (len(o_a), -1))
        if statically_known_true(out.shape[0] % 8 == 0):
            # Groups times tokens: what the second product reads is there without a copy. Where rows of T values do not
            # start at multiples of 16 bytes, that product is slower than the copy (77 us against 47 for 6 tokens, H200,
            # 2026-11-30).
            return self.o_b(torch.bmm(o_a, groups.permute(1, 2, 0)).flatten(0, 1).t())
        return self.o_b(torch.bmm(groups.transpose(0, 1), o_a.transpose(1, 2)).transpose(0, 1).flatten(1))

    def forward(
        self,
        x: Tensor,
        state_ids: Tensor,
        positions: Tensor,
        *,
        q_starts: Tensor | None = None,
        valid_start: Tensor | None = None,
        cache: Tensor | None = None,
    ) -> Tensor:
        """A decode step, or with `q_starts` a prefill: prompts, chunks of prompts, decode tokens, padding.

        Args:
            x: [T, hidden_size], in the dtype of the weights.
            state_ids: int32 [T], slot of each token's sequence, -1 for a padded row. The tokens of a sequence stand
                together, in order of position; in a decode step there are tokens_per_step rows for each sequence.
            positions: int64 [T].
            q_starts: int64 [T], position of the first new token of the token's sequence.
            valid_start: int32 [T], first position of the sequence that may be read; default 0.
            cache: rings of this layer for this call, in place of those of the module; written.

        Returns:
            [T, hidden_size].

        Raises:
            InvalidArgumentError: no cache, or as `store` and the attention functions raise.
        """
        cache = self.cache if cache is None else cache
        require(cache is not None, "cache", None, "a tensor, here or for the class")
        assert cache is not None
        q_a, kv = self.project(x)
        where, eps = (cache, state_ids, positions), self.config.rms_eps
        options = {**self.asked, "sinks": local(self.sinks), "valid_start": valid_start}
        if q_starts is None:
            q_a = api_store.norm_store(q_a, kv, None, *where, x_eps=eps, x_weight=self.q_a_norm, **self.stored)
            q = self.queries(q_a)
            out = api.attention(q, *where, tokens_per_step=self.spec.tokens_per_step, **options)
        else:
            q = self.queries(rms_norm(q_a, self.q_a_norm, eps))
            out = api.attention_prefill(q, self.read_back(kv, *where), None, *where, q_starts, **options)
            api_store.store(kv, None, *where, **self.stored)
        assert isinstance(out, Tensor)  # no lse was asked for
        return self.output(out)

    @property
    def stored(self) -> dict[str, Any]:
        """How kv of `project` becomes a record: options of the functions that store."""
        eps, weight = self.config.rms_eps, self.kv_norm
        return {"spec": self.spec, "norm_eps": eps, "norm_weight": weight, "rope": self.table}

    @property
    def asked(self) -> dict[str, Any]:
        """How `queries` attend: options of the attention functions.

        Values are keys, so they are rotated by their position; turning back by the query's leaves the distance.
        """
        eps = self.config.rms_eps if self.config.q_norm else None
        return {"spec": self.spec, "q_norm_eps": eps, "rope": self.table, "inverse_rope": True}

    def read_back(self, kv: Tensor, cache: Tensor, state_ids: Tensor, positions: Tensor) -> Tensor:
        """kv of `project` as decode steps will read it, so that chunks of any length give the same outputs."""
        # Storing now would overwrite history that attention still reads. No token has a slot, so no byte is written.
        nowhere = torch.full_like(state_ids, -1)
        return api_store.store_cast_back(kv, None, cache, nowhere, positions, **self.stored)[0]
