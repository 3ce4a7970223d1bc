"""swa_inductor::attention: sliding-window attention that reads its keys from the rings, without an index tensor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from swa_inductor import checks, checks_values, reference
from swa_inductor.meta._library import define
from swa_inductor.reference_query import Query

SCHEMA = (
    "attention(Tensor q, Tensor cache, Tensor state_ids, Tensor positions, Tensor? valid_start=None, "
    "Tensor? sinks=None, Tensor? q_norm_weight=None, Tensor? rope=None, *, int window, float scale, str kv_format, "
    "int? v_head_dim=None, int tokens_per_step=1, float? softcap=None, bool return_lse=False, "
    "float? q_norm_eps=None, bool rope_interleaved=True, bool inverse_rope=False) -> (Tensor, Tensor)"
)


@dataclass(frozen=True)
class Call:
    """The arguments of a call, as api.attention explains them."""

    q: Tensor
    cache: Tensor
    state_ids: Tensor
    positions: Tensor
    valid_start: Tensor | None = None
    sinks: Tensor | None = None
    q_norm_weight: Tensor | None = None
    rope: Tensor | None = None
    _: KW_ONLY
    window: int
    scale: float
    kv_format: str
    v_head_dim: int | None = None
    tokens_per_step: int = 1
    softcap: float | None = None
    return_lse: bool = False
    q_norm_eps: float | None = None
    rope_interleaved: bool = True
    inverse_rope: bool = False

    @property
    def v_dim(self) -> int:
        return self.q.shape[2] if self.v_head_dim is None else self.v_head_dim

    def check(self) -> Query:
        """Shapes and dtypes, no value is read; returns what surrounds the attention."""
        checks.check_attention(
            self.q,
            self.cache,
            self.state_ids,
            self.positions,
            self.valid_start,
            self.sinks,
            self.window,
            self.kv_format,
            self.v_head_dim,
            self.tokens_per_step,
            self.scale,
            self.softcap,
        )
        flags = {"rope_interleaved": self.rope_interleaved, "inverse_rope": self.inverse_rope}
        query = Query(self.q_norm_weight, self.rope, q_norm_eps=self.q_norm_eps, **flags)
        query.check(self.q, self.v_dim)
        return query


def fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **options)
    call.check()
    tokens, heads, _ = call.q.shape
    lse = (tokens, heads) if call.return_lse else (0,)
    return call.q.new_empty((tokens, heads, call.v_dim)), call.q.new_empty(lse, dtype=torch.float32)


def eager(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **options)
    query = call.check()
    checks_values.check_values(call.cache, call.state_ids, call.positions, call.valid_start, call.tokens_per_step)

    def attend(q: Tensor, state_ids: Tensor) -> tuple[Tensor, Tensor]:
        where = (call.cache, state_ids, call.positions, call.valid_start, call.sinks, call.window, call.scale)
        return reference.attention(q, *where, call.kv_format, call.v_head_dim, call.softcap)

    out, lse = query.around(attend, call.q, call.state_ids, call.positions)
    return out.to(call.q.dtype), lse if call.return_lse else lse.new_empty(0)


define(SCHEMA, fake=fake, eager=eager)
