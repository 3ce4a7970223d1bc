"""What the ops that store have in common: their arguments and checks, and the write itself in eager mode."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from swa_inductor import checks, checks_values, reference
from swa_inductor.errors import require
from swa_inductor.reference_rope import check_norm, check_rope, norm_rope, within

ARGUMENTS = (
    "Tensor k, Tensor? v, Tensor(a!) cache, Tensor state_ids, Tensor positions, "
    "Tensor? norm_weight=None, Tensor? rope=None, *, str kv_format, float min_amax, "
)
OPTIONS = "float? norm_eps=None, bool rope_interleaved=True"


@dataclass(frozen=True)
class Write:
    """The arguments of a call, as api_store.store explains them. The tensors are nodes of a graph in a lowering."""

    k: Any
    v: Any
    cache: Any
    state_ids: Any
    positions: Any
    norm_weight: Any = None
    rope: Any = None
    _: KW_ONLY
    kv_format: str
    min_amax: float
    norm_eps: float | None = None
    rope_interleaved: bool = True

    def check(self) -> None:
        """Shapes and dtypes; no value is read."""
        where = (self.cache, self.state_ids, self.positions)
        checks.check_store(self.k, self.v, *where, self.kv_format, self.min_amax)
        check_norm("norm", self.k, self.norm_weight, self.norm_eps)
        check_rope(self.rope, self.k, self.rope_interleaved, head_dim=self.k.shape[2])

    def __call__(self) -> Tensor:
        """Check everything, values where they can be read, and store; returns k as it is cast, after norm and RoPE."""
        self.check()
        state_ids, positions, rope = self.state_ids, self.positions, self.rope
        checks_values.check_values(self.cache, state_ids, positions)
        if rope is not None and checks_values.readable(positions):
            end = rope.shape[0]
            beyond = positions[(state_ids >= 0) & (positions >= end)]
            allowed = f"below {end}, the positions of rope, where state_ids >= 0"
            require(beyond.numel() == 0, "positions", beyond[:1].tolist(), allowed)
        k = norm_rope(self.k, positions, self.norm_weight, self.norm_eps, rope, self.rope_interleaved)
        ids = within(rope, state_ids, positions)
        reference.store(k, self.v, self.cache, ids, positions, self.kv_format, self.min_amax)
        return k
