"""swa_inductor::gather: history rows, zero rows, and new tokens behind them."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BY_NAME, CASES, GATHER_ARGS, Case, gather_op, has_constants, prefill_inputs, template_launches
from numerics import assert_same

import swa_inductor as swa
from swa_inductor import records
from swa_inductor.testing import generate_code, run_on_cpu

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def plain(case: Case, x: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule as a loop."""
    spec, w = case.spec, case.spec.window
    ks, vs = [], []
    for b, (slot, start) in enumerate(zip(x["slots"].tolist(), x["starts"].tolist(), strict=True)):
        low = 0 if x["lower"] is None else int(x["lower"][b])
        for p in range(start - w, start):
            if slot >= 0 and p >= low:
                k, v = records.decode_record(
                    x["cache"][slot, p % spec.rows], spec.kv_format, spec.head_dim, spec.v_head_dim
                )
            else:
                k = torch.zeros(spec.num_kv_heads, spec.head_dim)
                v = torch.zeros(spec.num_kv_heads, spec.output_head_dim)
            ks.append(k.to(case.dtype))
            vs.append(v.to(case.dtype))
    k = torch.cat([torch.stack(ks), x["k"]])
    return k, None if x["v"] is None else torch.cat([torch.stack(vs), x["v"]])


@every_case
def test_rows(case: Case) -> None:
    """Bit-equal to the loop, in eager mode and as one generated kernel, whose buffers start as NaN (B5)."""
    x = prefill_inputs(case)
    args = [x[n] for n in GATHER_ARGS]
    want_k, want_v = plain(case, x)
    code = generate_code(gather_op(case), *args)
    assert len(template_launches(code)) == len(code.launches) == 1
    for k, *v in (gather_op(case)(*args), run_on_cpu(code, args)):
        assert_same(k, want_k)
        if want_v is not None:
            assert_same(v[0], want_v)


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_compiled_on_the_cpu(name: str) -> None:
    case = BY_NAME[name]
    x = prefill_inputs(case)
    torch._dynamo.reset()
    args = [x[n] for n in GATHER_ARGS]
    for value, want in zip(torch.compile(gather_op(case), fullgraph=True)(*args), plain(case, x), strict=True):
        assert (value is None and want is None) or torch.equal(value, want)


@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_only_history_is_read(poison: int) -> None:
    """A11: a sequence whose ring was never written and valid_start = q_start gets zero rows from a poisoned ring."""
    case = BY_NAME["v4"]
    cache = torch.full(case.spec.cache_shape(1), poison, dtype=torch.uint8)
    slot, start = torch.zeros(1, dtype=torch.int32), torch.tensor([2048])
    args = (cache, slot, start, start.int(), None, None)
    for k, *_ in (gather_op(case)(*args), run_on_cpu(generate_code(gather_op(case), *args), args)):
        assert k.shape == (128, 1, 512) and not k.any()


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_bad_device_metadata_gives_zero_rows(name: str) -> None:
    """Slots that are none, and a valid_start beyond the history; the sequence between them keeps its rows."""
    case = BY_NAME[name]
    x = prefill_inputs(case)
    slots = x["cache"].shape[0]
    ids = torch.tensor([slots, 1, -1, 2**31 - 1, -5, 0], dtype=torch.int32)
    starts = torch.full((6,), 300)
    lower = torch.tensor([0, 0, 0, 0, 0, 301], dtype=torch.int32)
    args = (x["cache"], ids, starts, lower, None, None)
    window = case.spec.window
    want = gather_op(case)(x["cache"], ids[1:2], starts[:1], lower[:1], None, None)
    for values in (gather_op(case)(*args), run_on_cpu(generate_code(gather_op(case), *args), args)):
        assert len(values) >= 1 + (want[1] is not None)
        for value, one in zip(values, want, strict=False):  # v is none where K = V
            if one is not None:
                assert_same(value[window : 2 * window], one)
                assert not value[:window].any() and not value[2 * window :].any()


def test_gathering_first_is_independent_of_the_new_tokens() -> None:
    """A4: the gathered section is the same for every number of new tokens, as it is read before they are stored."""
    case = BY_NAME["v4"]
    spec = case.spec
    x = prefill_inputs(case)
    cache = x["cache"]
    slot, start = torch.zeros(1, dtype=torch.int32), torch.tensor([2048])
    want, _ = swa.gather(cache, slot, start, spec=spec, dtype=torch.bfloat16)
    for n in (1, 7, 8, 300):
        work = cache.clone()
        got, _ = swa.gather(work, slot, start, spec=spec, dtype=torch.bfloat16)
        new = torch.randn(n, 1, 512).bfloat16()
        swa.store(new, None, work, slot.expand(n).contiguous(), torch.arange(2048, 2048 + n), spec=spec)
        assert_same(got, want)
        late, _ = swa.gather(work, slot, start, spec=spec, dtype=torch.bfloat16)
        assert torch.equal(late, want) == (n < 7)  # the 7th new token takes the row of position 1920


def test_consumers_fuse_behind_gather() -> None:
    case = BY_NAME["v4"]
    x = prefill_inputs(case)
    args = [x[n] for n in GATHER_ARGS]

    def fn(*args: torch.Tensor) -> torch.Tensor:
        return gather_op(case)(*args)[0].float() * 3

    code = generate_code(fn, *args)
    assert len(code.launches) == 1
    assert_same(run_on_cpu(code, args)[0], fn(*args))


@pytest.mark.parametrize(
    ("capability", "slot", "record", "e4m3", "words"),
    [
        ((8, 6), 0, 0, False, True),
        ((8, 9), 0, 0, True, True),
        ((9, 0), 4, 0, True, True),
        ((9, 0), 2, 0, True, False),  # slots, or records of a row, begin between words
        ((9, 0), 0, 2, True, False),
    ],
)
def test_what_a_kernel_knows_of_records(
    capability: tuple[int, int], slot: int, record: int, e4m3: bool, words: bool
) -> None:
    """Whether the card converts e4m3 and records may be read in words; `slot`, `record`: bytes between two of them."""
    case = BY_NAME["gpt-oss"]
    x = prefill_inputs(case)
    slots, *shape, size = x["cache"].shape
    ring = math.prod(shape) * (size + record)
    x["cache"] = torch.zeros(slots, ring + slot, dtype=torch.uint8)[:, :ring].view(slots, *shape, -1)[..., :size]
    code = generate_code(gather_op(case), *(x[n] for n in GATHER_ARGS), capability=capability)
    assert has_constants(code.source, HARDWARE_E4M3=e4m3, WORDS=words)
