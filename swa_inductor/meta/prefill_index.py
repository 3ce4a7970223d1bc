"""swa_inductor::prefill_index: the workspace rows that each query of a prefill sees, one by one."""

from __future__ import annotations

from torch import Tensor

from swa_inductor import checks, reference_inline
from swa_inductor.meta._library import define

SCHEMA = "prefill_index(Tensor pivots, *, int window) -> Tensor"


def fake(pivots: Tensor, *, window: int) -> Tensor:
    checks.check_prefill_index(pivots, window)
    return pivots.new_empty((pivots.shape[0], window))


def eager(pivots: Tensor, *, window: int) -> Tensor:
    checks.check_prefill_index(pivots, window)
    return reference_inline.prefill_index(pivots, window)


define(SCHEMA, fake=fake, eager=eager)
