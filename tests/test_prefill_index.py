"""swa_inductor::prefill_index: the two ranges one by one, in eager mode, C++ and generated sm_90 code."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from numerics import assert_same
from runs import HOW, Runs
from torch.testing import FileCheck

import swa_inductor as swa
from swa_inductor.testing import generate_code

V4 = swa.RingSpec(128, 6, 512, shared_kv=True)


@cache
def runs() -> Runs:
    return Runs(lambda pivots: swa.prefill_index(pivots, spec=V4) * 1, torch.zeros(7, 4, dtype=torch.int32))


def expected(pivots: list[list[int]]) -> torch.Tensor:
    rows = [[*range(a, a + n), *range(b, b + m)] for a, n, b, m in pivots]
    return torch.tensor([r + [-1] * (128 - len(r)) for r in rows], dtype=torch.int32).reshape(-1, 128)


@pytest.mark.parametrize("how", HOW)
def test_ranges(how: str) -> None:
    """The examples of the rule; a padded token (zeros) has no row; F12: no token at all."""
    examples = [
        [1, 127, 128, 1],
        [127, 1, 128, 127],
        [128, 0, 128, 128],
        [128, 0, 201, 128],
        [78, 50, 128, 1],
        [28, 100, 128, 1],
        [128, 0, 128, 1],
        [0, 0, 0, 0],
    ]
    for pivots in (examples, examples[:3]):
        assert_same(runs()(how, torch.tensor(pivots, dtype=torch.int32))[0], expected(pivots))
    empty = runs()(how, torch.zeros(0, 4, dtype=torch.int32))[0]
    assert empty.shape == (0, 128) and empty.dtype == torch.int32


def test_of_a_plan() -> None:
    """Behind a plan: every token of a chunk, and the padded one at its end."""
    plan = swa.PrefillMetadata.build(
        V4, num_slots=4, state_ids=[1, 3], q_lens=[300, 20], k_lens=[2348, 30], num_tokens=321
    )
    index = swa.prefill_index(plan.pivots, spec=V4)
    assert_same(index, expected(plan.pivots.tolist()))
    assert ((index >= 0).sum(1)[:300] == 128).all() and (index[-1] == -1).all()
    assert (index >= 0).sum(1)[300:320].tolist() == list(range(11, 31))


def test_fuses_with_its_consumer() -> None:
    """One kernel, no intermediate."""

    def fn(pivots: torch.Tensor) -> torch.Tensor:
        return torch.where(swa.prefill_index(pivots, spec=V4) < 0, 0.0, 1.0)

    code = generate_code(fn, torch.zeros(5, 4, dtype=torch.int32))
    FileCheck().check_count(".run(", 1, exactly=True).check_not("extern").check_not("torch.ops").run(code.call)
    assert [a.size for a in code.allocations] == [(5, 128)]
