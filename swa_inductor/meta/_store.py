"""What the ops that store have in common: their arguments and checks, and the write itself in eager mode."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, checks_values, reference
from swa_inductor.errors import require
from swa_inductor.reference_rope import check_norm, check_rope, norm_rope, within

ARGUMENTS = (
    "Tensor k, Tensor? v, Tensor(a!) cache, Tensor state_ids, Tensor positions, "
    "Tensor? norm_weight=None, Tensor? rope=None, *, str kv_format, float min_amax, "
)
OPTIONS = "float? norm_eps=None, bool rope_interleaved=True"


def check(
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    kv_format: str,
    min_amax: float,
    norm_eps: float | None = None,
    rope_interleaved: bool = True,
) -> None:
    """Shapes as in api_store.store; no value is read."""
    checks.check_store(k, v, cache, state_ids, positions, kv_format, min_amax)
    check_norm("norm", k, norm_weight, norm_eps)
    check_rope(rope, k)
    pairs = rope is None or not rope_interleaved or k.shape[2] % 2 == 0
    require(pairs, "k shape", tuple(k.shape), "an even head_dim with interleaved rope")


def write(
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    state_ids: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None = None,
    rope: Tensor | None = None,
    *,
    kv_format: str,
    min_amax: float,
    norm_eps: float | None = None,
    rope_interleaved: bool = True,
) -> Tensor:
    """Check the values of arguments that `check` has seen, and store; returns k as it is cast, after norm and RoPE."""
    checks_values.check_values(cache, state_ids, positions)
    if rope is not None and checks_values.readable(positions):
        end = rope.shape[0]
        beyond = positions[(state_ids >= 0) & (positions >= end)]
        allowed = f"below {end}, the positions of rope, where state_ids >= 0"
        require(beyond.numel() == 0, "positions", beyond[:1].tolist(), allowed)
    k = norm_rope(k, positions, norm_weight, norm_eps, rope, rope_interleaved)
    reference.store(k, v, cache, within(rope, state_ids, positions), positions, kv_format, min_amax)
    return k
