"""swa_inductor::norm_store: store, and in the same kernel an RMSNorm of other rows of the same tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swa_inductor import checks
from swa_inductor.meta import _store
from swa_inductor.meta._library import define
from swa_inductor.reference_rope import check_norm, rms_norm

SCHEMA = f"norm_store(Tensor x, Tensor? x_weight, {_store.ARGUMENTS}float x_eps, {_store.OPTIONS}) -> Tensor"


def fake(
    x: Tensor,
    x_weight: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    cache: Tensor,
    *args: Any,
    x_eps: float,
    **options: Any,
) -> Tensor:
    _store.Write(k, v, cache, *args, **options).check()
    checks.check_normed(x, k.shape[0], cache)
    check_norm("x", x, x_weight, x_eps)
    return x.new_empty(x.shape)


def eager(x: Tensor, x_weight: Tensor | None, *args: Any, x_eps: float, **options: Any) -> Tensor:
    fake(x, x_weight, *args, x_eps=x_eps, **options)
    _store.Write(*args, **options)()
    return rms_norm(x, x_weight, x_eps).to(x.dtype).contiguous()


define(SCHEMA, fake=fake, eager=eager)
