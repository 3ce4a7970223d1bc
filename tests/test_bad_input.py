"""Whatever is wrong with an argument: InvalidArgumentError names it, what came and what is allowed; nothing is written.

`CALLS` holds a right call of every function that takes tensors. Each tensor of it is made wrong in every dtype, rank,
size and device, and must be named; where another argument is the one that no longer fits, `OTHERS` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case, flat, norm_inputs, prefill_inputs, unflat
from numerics import assert_same
from runs import ints
from torch import Tensor

import swa_inductor as swa
from swa_inductor.meta._library import OPS

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float64, torch.complex64]
DTYPES += [BF16, torch.float16, FP32, torch.float8_e4m3fn, torch.float8_e8m0fnu]
FLOATS = (BF16, torch.float16, FP32)

SPEC = swa.RingSpec(8, 2, 64, num_kv_heads=2, v_head_dim=32)
RAW = swa.RawRingSpec(4, 2, 16)
CASE = Case("bad", SPEC, 4, sinks=True, valid_start=True)
SLOTS = CASE.slots

Call = tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]
"""A function, its tensors, its other arguments."""


def calls() -> dict[str, Call]:
    """A call of every function, on fresh tensors."""
    x = prefill_inputs(CASE, q_lens=(2, 4))  # of which every two rows are a step
    x |= norm_inputs(CASE, x, rope_dim=32)
    weights = {"q_norm_weight": torch.ones(64), "rope": x["rope"], "sinks": x["sinks"]}
    tokens = len(x["k"])
    around = {"spec": SPEC, "q_norm_eps": 1e-6, "inverse_rope": True}
    meta = {n: x[n] for n in ("state_ids", "positions")}
    lists = {"state_ids": ints(0, 1), "valid_start": ints(0, 0)}
    stored = {n: x[n] for n in ("k", "v", "cache", "state_ids", "positions", "norm_weight", "rope")}
    turned = {"spec": SPEC, "norm_eps": 1e-6}
    sequences = {"lengths": torch.tensor([5, 9]), "accepted": ints(1, 1), "draft_counts": ints(1, 1), **lists}
    buffers = dict(zip(BUFFERS, flat(swa.PreparedDecode.allocate(SPEC, 2, width=8)), strict=True))
    raw = torch.zeros(RAW.ring.cache_shape(SLOTS), dtype=torch.uint8)
    geometry = {"spec": SPEC, "num_slots": SLOTS}
    half, lse = torch.ones(3, 4, 32), torch.zeros(3, 4)
    return {
        "store": (swa.store, stored, turned),
        "store_cast_back": (swa.store_cast_back, stored, turned),
        "norm_store": (swa.norm_store, {"x": x["x"], "x_weight": x["x_weight"], **stored}, {"x_eps": 1e-6, **turned}),
        "attention": (
            swa.attention,
            {"q": x["q"], "cache": x["cache"], **meta, "valid_start": x["valid_start"], **weights},
            {"tokens_per_step": 2, **around},
        ),
        "attention_prefill": (
            swa.attention_prefill,
            {**{n: x[n] for n in ("q", "k", "v", "cache", *meta, "q_starts", "valid_start")}, **weights},
            around,
        ),
        "attention_workspace": (
            swa.attention_workspace,
            {"q": x["q"], "k": x["k"], "v": x["v"], "pivots": ints(*[0] * 4 * tokens).view(-1, 4), "sinks": x["sinks"]},
            {"window": 8},
        ),
        "attention_index": (
            swa.attention_index,
            {"q": x["q"], "cache": x["cache"], "index": ints(*[0] * 3 * tokens).view(-1, 3), "sinks": x["sinks"]},
            {"kv_format": "mxfp8", "v_head_dim": 32},
        ),
        "gather": (
            swa.gather,
            {"cache": x["cache"], **lists, "q_starts": torch.tensor([3, 0]), "k": x["k"], "v": x["v"]},
            {"spec": SPEC, "dtype": BF16},
        ),
        "decode_index": (swa.decode_index, {**lists, "positions": torch.tensor([3, 0])}, geometry),
        "prefill_plan": (
            swa.prefill_plan,
            {**lists, "q_lens": ints(1, 2), "k_lens": ints(5, 2)},
            {"num_tokens": 3, **geometry},
        ),
        "prefill_index": (swa.prefill_index, {"pivots": ints(0, 8, 8, 0).view(1, 4)}, {"spec": SPEC}),
        "prepare_decode": (swa.prepare_decode, sequences, geometry),
        "prepare_decode.out": (prepare_into, {**sequences, **buffers}, {"width": 8, **geometry}),
        "ring_read_raw": (
            swa.ring_read_raw,
            {"cache": raw, **lists, "positions": torch.tensor([3, 0])},
            {"spec": RAW},
        ),
        "ring_write_raw": (
            swa.ring_write_raw,
            {"values": torch.ones(2, 16), "cache": raw, "state_ids": ints(0, 1), "positions": torch.tensor([3, 0])},
            {"spec": RAW},
        ),
        "merge_attention": (
            swa.merge_attention,
            {"out_a": half, "lse_a": lse, "out_b": half + 1, "lse_b": lse + 1, "sinks": torch.ones(4)},
            {},
        ),
    }


BUFFERS = ["token_state_ids", "token_positions", "token_valid_start", "store_rows", "offset_len", "index"]
BUFFERS = [f"out.{name}" for name in (*BUFFERS, "new_lengths", "errors")]


def prepare_into(**args: Any) -> Tensor:
    out = unflat(*(args.pop(name) for name in BUFFERS))
    return swa.prepare_decode(out=out, **args).errors + 0


OPTIONAL = {"v", "valid_start", "sinks", "norm_weight", "x_weight", "q_norm_weight", "rope", "draft_counts"}
WIDE = (*FLOATS, torch.float64)
ALLOWED: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("norm_weight", "x_weight", "q_norm_weight", "x", "values"), FLOATS),
    **dict.fromkeys(("out_a", "out_b", "sinks"), WIDE),
    **dict.fromkeys(("lse_a", "lse_b"), (FP32, torch.float64)),
}
"""Dtypes that may come, where more than that of the right call."""
RIGHT = {  # (function, argument, mistake) that is none: nothing else has to fit
    *((name, "cache", "size 0") for name in (*OPS, "ring_write_raw")),
    *((name, "rope", "size 0") for name in OPS),
    *(("attention", "q", f"dtype {dtype}") for dtype in FLOATS),
    *(("attention_index", "q", f"dtype {dtype}") for dtype in FLOATS),
    ("attention_index", "index", "size 1"),
    ("attention_index", "cache", "size 1"),
    ("attention_workspace", "v", "size 2"),
    ("gather", "k", "size 0"),
    ("norm_store", "x", "size 1"),
    ("prefill_index", "pivots", "size 0"),
    ("prefill_index", "pivots", "device"),
}
OTHERS = {  # by argument and mistake: the other arguments that no longer fit, one of which is named instead
    ("x", "size 1"): ("x_weight shape",),
    ("k", "none"): ("v: got a tensor; allowed: as k",),
    ("k", "dtype"): ("v dtype",),
    ("k", "size 0"): ("v shape",),
    ("k", "size 1"): ("v shape", "q heads"),
    ("k", "size 2"): ("head_dim: got 65; allowed: a multiple of 32",),
    ("v", "size 2"): ("v_head_dim: got 33; allowed: a multiple of 32",),
    ("q", "dtype"): ("k dtype",),
    ("q", "size 0"): ("k shape", "state_ids shape", "index shape", "pivots shape"),
    ("q", "size 1"): ("q heads: got 5; allowed: a multiple of num_kv_heads=2",),
    ("q", "size 2"): ("head_dim: got 65; allowed: a multiple of 32", "k shape"),
    ("q", "device"): ("k device",),
    ("cache", "size 2"): ("q heads: got 4; allowed: a multiple of num_kv_heads=3", "k shape"),
    ("cache", "device"): ("state_ids device", "q device", "values device"),
    ("state_ids", "size 0"): ("positions shape", "q_starts shape", "q_lens shape", "lengths shape"),
    ("state_ids", "device"): ("positions device", "q_lens device", "lengths device"),
    ("values", "size 0"): ("state_ids shape",),
    ("out_a", "device"): ("lse_a device",),
    **{("out_a", f"size {dim}"): ("lse_a shape", "out_b shape") for dim in range(3)},
}


def spoiled(name: str, t: Tensor) -> Iterator[tuple[str, Tensor | None, str]]:
    """Kind of mistake, the wrong value, and what the error says of it."""
    if name not in OPTIONAL:
        yield "none", None, f"{name}: got None; allowed: "
    for dtype in DTYPES:
        if dtype not in (t.dtype, *ALLOWED.get(name, ())):
            yield f"dtype {dtype}", torch.zeros(t.shape).to(dtype), f"{name} dtype: got {dtype}; allowed: "
    yield "rank below", t[0], f"{name} shape: got {tuple(t.shape[1:])}; allowed: "
    yield "rank above", t[None], f"{name} shape: got {(1, *t.shape)}; allowed: "
    for dim in range(t.dim()):
        more = torch.cat([t, t.narrow(dim, 0, 1)], dim)
        yield f"size {dim}", more, f"{name} shape: got {tuple(more.shape)}; allowed: "
    yield "device", t.to("meta"), f"{name} device: got meta; allowed: cpu"


def refused(call: Callable[[], object], texts: tuple[str, ...], held: dict[str, Tensor]) -> str:
    """The message of the error, which starts with one of `texts`; none of the tensors changes."""
    before = {name: t.clone() for name, t in held.items()}
    with pytest.raises(swa.InvalidArgumentError) as error:
        call()
    message = str(error.value)
    assert message.startswith(texts) and ": got " in message, message
    assert message.partition("; allowed: ")[2] not in ("", "None"), message
    for name, t in held.items():
        assert_same(t, before[name])
    return message


def refused_when_traced(function: Callable, args: dict[str, Any], options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception) as error:  # noqa: B017, PT011  torch wraps it
        torch.compile(lambda **args: function(**args, **options), fullgraph=True, backend="eager")(**args)
    assert message in str(error.value)


def test_every_function_is_covered_here() -> None:
    functions = {
        name for name in swa.__all__ if callable(getattr(swa, name)) and not isinstance(getattr(swa, name), type)
    }
    assert set(calls()) >= functions - {"explain"} | set(OPS)
    for function, tensors, options in calls().values():
        function(**tensors, **options)


@pytest.mark.parametrize("name", calls())
def test_tensors(name: str) -> None:
    """A7, C11, C12: in eager mode and, the first of each kind, at trace time."""
    function, tensors, options = calls()[name]
    for argument, t in tensors.items():
        traced: set[str] = set()
        for kind, wrong, text in spoiled(argument, t):
            if (name, argument, kind) in RIGHT:
                continue
            others = OTHERS.get((argument, kind), OTHERS.get((argument, kind.split()[0]), ()))
            args = {**tensors, argument: wrong}
            message = refused(partial(function, **args, **options), (text, *others), tensors)
            assert message.startswith((text, *others))
            family = kind.split()[0]
            if family in ("dtype", "rank", "size") and family not in traced:
                traced.add(family)
                refused_when_traced(function, args, options, message)


GEOMETRY_ROWS = [
    ({"spec": None}, "spec: got NoneType; allowed: a RingSpec"),
    ({"spec": RAW}, "spec: got RawRingSpec; allowed: a RingSpec"),
]
SLOT_ROWS = [
    ({"num_slots": 0}, "num_slots: got 0; allowed: an integer of at least 1"),
    ({"num_slots": -1}, "num_slots: got -1; allowed: an integer of at least 1"),
    ({"num_slots": 2**31 // 10 + 1}, "num_slots: got 214748365 of R=10; allowed: 1 and up, num_slots * R below 2^31"),
]
NORM_ROWS = [
    *(
        ({"norm_eps": eps}, f"norm_eps: got {eps}; allowed: None (no norm) or a positive")
        for eps in (0.0, -1.0, NAN, INF)
    ),
    ({"norm_eps": None}, "norm_eps: got None; allowed: a positive number with norm_weight"),
    ({"spec": swa.RingSpec(9, 2, 64, num_kv_heads=2, v_head_dim=32)}, "cache shape: got (4, 10, 2, 99); allowed: R=11"),
    (
        {"spec": swa.RingSpec(8, 2, 64, num_kv_heads=2, kv_format="bf16")},
        "cache shape: got (4, 10, 2, 99); allowed: [num",
    ),
    ({"cache": lambda t: t.transpose(2, 3)}, "cache shape: got (4, 10, 99, 2)"),
    ({"cache": lambda t: t.repeat_interleave(2, -1)[..., ::2]}, "cache stride(3): got 2; allowed: 1"),
    (
        {"cache": lambda t: torch.zeros(t.numel() + 8).byte()[8:].view(t.shape)},
        "cache storage offset: got 8; allowed: a",
    ),
    ({"cache": lambda t: t[:0]}, "cache shape: got (0, 10, 2, 99); allowed: at least one slot"),
    ({"v": None}, "cache shape: got (4, 10, 2, 99); allowed: [num_slots, R, num_kv_heads=2, record_bytes=66]"),
    ({"rope": lambda t: t[:, :31]}, "rope shape: got (302, 31); allowed: [num_positions, rope_dim], cos then sin"),
    ({"rope": lambda t: torch.cat([t, t, t], 1)}, "rope shape: got (302, 96)"),
    ({"rope": lambda t: t[:0]}, "rope shape: got (0, 32); allowed: at least one position"),
    ({"rope": lambda t: t.T.contiguous().T}, "rope stride(1): got 302; allowed: 1"),
]
SOFTMAX_ROWS = [
    *(({"scale": scale}, f"scale: got {scale}; allowed: a finite number") for scale in (NAN, INF, -INF)),
    *(({"softcap": cap}, f"softcap: got {cap}; allowed: None or a positive number") for cap in (0.0, -1.0, NAN, INF)),
]
QUERY_ROWS = [
    *SOFTMAX_ROWS,
    *GEOMETRY_ROWS,
    *(
        ({"q_norm_eps": eps}, f"q_norm_eps: got {eps}; allowed: None (no norm) or a positive")
        for eps in (0.0, NAN, INF)
    ),
    ({"q_norm_eps": None}, "q_norm_eps: got None; allowed: a positive number with q_norm_weight"),
    ({"rope": None}, "rope: got None; allowed: a table with inverse_rope"),
    (
        {"rope": lambda t: torch.cat([t, t], 1)},
        "rope shape: got (302, 64); allowed: [num_positions, rope_dim], cos then sin, rope_dim even, "
        "from 2 to v_head_dim=32",
    ),
    ({"spec": swa.RingSpec(9, 2, 64, num_kv_heads=2, v_head_dim=32)}, "cache shape: got (4, 10, 2, 99); allowed: R=11"),
]
VALUE_ROWS = [  # in eager mode on the CPU alone; elsewhere such rows are padding
    ({"state_ids": lambda t: t.clone().fill_(SLOTS)}, "state_ids: got 4; allowed: -1 (padded row) to 3"),
    ({"state_ids": lambda t: t.clone().fill_(2**31 - 1)}, "state_ids: got 2147483647; allowed: -1 (padded row) to 3"),
    ({"state_ids": lambda t: t.clone().fill_(-2)}, "state_ids: got -2; allowed: -1 (padded row) to 3"),
    ({"state_ids": lambda t: t.clone().fill_(-(2**31))}, "state_ids: got -2147483648; allowed: -1 (padded row) to 3"),
    ({"positions": lambda t: t.clone().fill_(-1)}, "positions: got a negative position; allowed: 0 and up where"),
    ({"positions": lambda t: t.clone().fill_(-(2**63))}, "positions: got a negative position; allowed: 0 and up where"),
]
START_ROWS = [
    ({"valid_start": lambda t: t.clone().fill_(2**31 - 1)}, "valid_start: got a start after the query; allowed:")
]
WIDTH_ROWS = [({"width": 7}, "width: got 7; allowed: None or at least window=8")]
OUT_ROWS = [
    ({"width": None}, "out.index: got a tensor; allowed: an index exactly with width"),
    ({"out.index": None}, "out.index: got None; allowed: an index exactly with width"),
    (
        {"out.new_lengths": torch.zeros(2, 3).long()[:, 0]},
        "out.new_lengths stride: got (3,); allowed: (1,) (contiguous)",
    ),
    (
        {"out.new_lengths": torch.zeros(3).long()[1:]},
        "out.new_lengths storage offset: got 8 bytes; allowed: a multiple",
    ),
]
ROWS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "store": GEOMETRY_ROWS + NORM_ROWS,
    "store_cast_back": GEOMETRY_ROWS[:1] + NORM_ROWS[:2],
    "norm_store": GEOMETRY_ROWS[:1]
    + NORM_ROWS[:2]
    + [
        *(({"x_eps": eps}, f"x_eps: got {eps}; allowed: None (no norm) or a positive") for eps in (0.0, NAN, INF)),
        ({"x": lambda t: t[:, :0], "x_weight": None}, "x shape: got (8, 0); allowed: [T=8, N], N at least 1"),
    ],
    "attention": QUERY_ROWS
    + [
        ({"tokens_per_step": 0}, "tokens_per_step: got 0; allowed: an integer of at least 1"),
        ({"tokens_per_step": 3}, "q shape: got (8, 4, 64); allowed: T a multiple of tokens_per_step=3"),
        ({"tokens_per_step": 4}, "ring rows: got R=10 with window W=8, tokens_per_step D=4; allowed: R >= W + D - 1"),
    ],
    "attention_prefill": QUERY_ROWS,
    "attention_workspace": SOFTMAX_ROWS + [({"window": 0}, "window: got 0; allowed: an integer of at least 1")],
    "attention_index": SOFTMAX_ROWS
    + [
        ({"kv_format": "fp4"}, "kv_format: got 'fp4'; allowed: one of 'mxfp8', 'bf16', 'fp16', 'fp32'"),
        (
            {"v_head_dim": None},
            "cache shape: got (4, 10, 2, 99); allowed: [num_slots, R, num_kv_heads=2, record_bytes=66]",
        ),
        ({"v_head_dim": 33}, "v_head_dim: got 33; allowed: a multiple of 32"),
    ],
    "gather": GEOMETRY_ROWS
    + [
        (
            {"dtype": torch.float64},
            "dtype: got torch.float64; allowed: torch.bfloat16 or torch.float16 or torch.float32",
        ),
        ({"v": None}, "v: got None; allowed: as k, and None when K = V"),
    ],
    "decode_index": GEOMETRY_ROWS + SLOT_ROWS + WIDTH_ROWS,
    "prefill_plan": GEOMETRY_ROWS + SLOT_ROWS + [({"num_tokens": -1}, "num_tokens: got -1; allowed: 0 and up")],
    "prefill_index": GEOMETRY_ROWS,
    "prepare_decode": GEOMETRY_ROWS + SLOT_ROWS + WIDTH_ROWS + [({"out": 3}, "out: got 3; allowed: None or a Prep")],
    "prepare_decode.out": OUT_ROWS,
    "ring_read_raw": [
        ({"spec": SPEC}, "spec: got RingSpec; allowed: a RawRingSpec"),
        ({"spec": swa.RawRingSpec(4, 3, 16)}, "cache shape: got (4, 5, 1, 64); allowed: R=6 rows, those of spec"),
        (
            {"cache": lambda t: t[..., :63]},
            "cache shape: got (4, 5, 1, 63); allowed: [num_slots, entries, 1, bytes of an",
        ),
    ],
    "ring_write_raw": [
        ({"spec": SPEC}, "spec: got RingSpec; allowed: a RawRingSpec"),
        ({"spec": swa.RawRingSpec(4, 3, 16)}, "cache shape: got (4, 5, 1, 64); allowed: R=6 rows, those of spec"),
    ],
}
VALUES: dict[str, list[tuple[dict[str, Any], str]]] = {
    **dict.fromkeys(("store", "store_cast_back", "norm_store", "ring_write_raw"), VALUE_ROWS),
    **dict.fromkeys(("decode_index", "ring_read_raw"), VALUE_ROWS + START_ROWS),
    "attention": VALUE_ROWS
    + START_ROWS
    + [
        ({"positions": lambda t: t * 2}, "positions: got a step that mixes slots or skips a position; allowed: 2"),
        (
            {"state_ids": lambda t: torch.where(t == 0, ints(0, 1).repeat(4), t)},
            "positions: got a step that mixes slots",
        ),
    ],
    "attention_prefill": VALUE_ROWS
    + START_ROWS
    + [
        (
            {"q_starts": lambda t: t - 1},
            "q_starts: got [299]; allowed: the position of the first token of the sequence",
        ),
        (
            {"q_starts": lambda t: t + 9},
            "q_starts: got [309]; allowed: the position of the first token of the sequence",
        ),
        ({"q_starts": lambda t: t * 0 - 1}, "q_starts: got [-1]; allowed: the position of the first token"),
    ],
    "prefill_plan": [
        ({"state_ids": ints(0, SLOTS)}, "state_ids[1]: got 4; allowed: -1 (padded) to 3"),
        ({"state_ids": ints(-(2**31), 0)}, "state_ids[0]: got -2147483648; allowed: -1 (padded) to 3"),
        ({"q_lens": ints(1, -1)}, "q_lens[1]: got -1; allowed: 0 and up"),
        ({"q_lens": ints(1, 3)}, "k_lens[1]: got 2; allowed: q_lens[1]=3 and up (new tokens count)"),
        ({"valid_start": ints(5, 0)}, "valid_start[0]: got 5; allowed: up to q_start=4"),
        ({"num_tokens": 2}, "q_lens: got 3 tokens; allowed: num_tokens=2 at most"),
    ],
}
for _name in ("store", "store_cast_back", "norm_store"):
    beyond = ({"rope": lambda t: t[:300]}, "positions: got [300]; allowed: below 300, the positions of rope, where")
    VALUES[_name] = [*VALUE_ROWS, beyond]


def changed(tensors: dict[str, Tensor], options: dict[str, Any], change: dict[str, Any]) -> tuple[dict, dict]:
    """The arguments of a call after `change`; a function makes the wrong value of the right one."""
    given = {**tensors, **options}
    given |= {name: value(given[name]) if callable(value) else value for name, value in change.items()}
    own = {name for name in given if name in options or name not in tensors}
    return {n: v for n, v in given.items() if n not in own}, {n: v for n, v in given.items() if n in own}


@pytest.mark.parametrize("name", ROWS)
def test_other_arguments(name: str) -> None:
    """C11: geometry, options, strides; in eager mode and at trace time."""
    function, tensors, options = calls()[name]
    for change, text in ROWS[name]:
        args, rest = changed(tensors, options, change)
        message = refused(partial(function, **args, **rest), (text,), tensors)
        assert message.startswith(text)
        refused_when_traced(function, args, rest, message)


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    """F14: what eager code on the CPU looks at; compiled code and a GPU make padding of it (test_oracle.py)."""
    function, tensors, options = calls()[name]
    for change, text in VALUES[name]:
        args, rest = changed(tensors, options, change)
        assert refused(partial(function, **args, **rest), (text,), tensors).startswith(text)


def test_what_torch_refuses() -> None:
    """Another Python type where an op wants a tensor or a number: torch itself names argument and types."""
    function, tensors, options = calls()["attention"]
    for change, text in (
        (
            {"state_ids": [0]},
            "Expected a value of type 'Tensor' for argument 'state_ids' but instead found type 'list'",
        ),
        ({"scale": "1"}, "Expected a value of type 'float' for argument 'scale' but instead found type 'str'"),
        ({"tokens_per_step": 1.5}, "Expected a value of type 'int' for argument 'tokens_per_step'"),
    ):
        with pytest.raises(RuntimeError, match=text):
            function(**{**tensors, **options, **change})


def ring(**changes: object) -> swa.RingSpec:
    return swa.RingSpec(**{"window": 128, "tokens_per_step": 6, "head_dim": 64, **changes})


def raw_ring(**changes: object) -> swa.RawRingSpec:
    return swa.RawRingSpec(**{"ratio": 4, "tokens_per_step": 2, "width": 8, **changes})


LAYOUT = swa.StateLayout([SPEC, SPEC], [SPEC], [RAW])
NO_SLOTS = swa.SlotAllocator(2)


def on_state(method: str, *args: object, state: Callable[[Tensor], object] = lambda s: s) -> object:
    return getattr(LAYOUT, method)(state(LAYOUT.allocate(2)), *args)


def decode(**changes: object) -> swa.DecodeMetadata:
    step = {"num_slots": 4, "state_ids": [3, -1], "positions": [50, 0], "width": 8}
    return swa.DecodeMetadata.build(**{"spec": SPEC, **step, **changes})


def prefill(**changes: object) -> swa.PrefillMetadata:
    lists = {"state_ids": [3, 0], "q_lens": [2, 3], "k_lens": [50, 3]}
    return swa.PrefillMetadata.build(**{"spec": SPEC, "num_slots": 4, **lists, **changes})


INTEGER = "; allowed: an integer of at least 1"
HOST = [  # call, text of the error
    *(
        (partial(make, **{name: value}), f"{name}: got {value!r}{INTEGER}")
        for make, names in (
            (ring, ("window", "tokens_per_step", "head_dim", "num_kv_heads", "v_head_dim", "ring_rows")),
            (raw_ring, ("ratio", "tokens_per_step", "width", "entries")),
        )
        for name in names
        for value in (0, -1, 1.5, "8")
    ),
    *((partial(ring, **{name: None}), f"{name}: got None{INTEGER}") for name in ("window", "head_dim")),
    (partial(ring, kv_format="int4"), "kv_format: got 'int4'; allowed: one of 'mxfp8', 'bf16', 'fp16', 'fp32'"),
    (partial(ring, kv_format=["bf16"]), "kv_format: got ['bf16']; allowed: one of"),
    (partial(ring, head_dim=80), "head_dim: got 80; allowed: a multiple of 32 in format 'mxfp8'"),
    (partial(ring, v_head_dim=80), "v_head_dim: got 80; allowed: a multiple of 32 in format 'mxfp8'"),
    (partial(ring, shared_kv=True, v_head_dim=64), "v_head_dim: got 64; allowed: None when shared_kv (K is V)"),
    *(
        (partial(ring, min_amax=x), f"min_amax: got {x!r}; allowed: a positive number")
        for x in (0.0, -1, NAN, INF, "1")
    ),
    (
        partial(ring, ring_rows=132),
        "ring rows: got R=132 with window W=128, tokens_per_step D=6; allowed: R >= W + D - 1 = 133",
    ),
    (
        partial(raw_ring, entries=4),
        "ring rows: got R=4 with window W=4, tokens_per_step D=2; allowed: R >= W + D - 1 = 5",
    ),
    (partial(raw_ring, dtype="mxfp8"), "dtype: got 'mxfp8'; allowed: one of 'bf16', 'fp16', 'fp32'"),
    (partial(swa.StateLayout, []), "stored: got no ring; allowed: at least one ring"),
    (partial(swa.StateLayout, None), "stored: got None; allowed: a sequence, each a RingSpec"),
    (partial(swa.StateLayout, [SPEC, 3]), "stored[1]: got 3; allowed: a RingSpec"),
    (partial(swa.StateLayout, [SPEC], [RAW]), "dropped[0]: got RawRingSpec("),
    (partial(swa.StateLayout, [SPEC], [], [SPEC]), "compression[0]: got RingSpec("),
    *((partial(LAYOUT.allocate, n), f"num_slots: got {n!r}{INTEGER}") for n in (0, 1.5, "2")),
    *((partial(swa.SlotAllocator, n), f"num_slots: got {n!r}{INTEGER}") for n in (0, 1.5, "2")),
    (partial(on_state, "stored_view", 2), "stored layer: got 2; allowed: 0 to 1"),
    (partial(on_state, "dropped_view", -1), "dropped layer: got -1; allowed: 0 to 0"),
    (partial(on_state, "compression_view", 0.5), "compression layer: got 0.5; allowed: 0 to 0"),
    (
        lambda: swa.StateLayout([SPEC]).dropped_view(swa.StateLayout([SPEC]).allocate(1), 0),
        "dropped layer: got 0; allowed: none",
    ),
    (partial(on_state, "stored_view", 0, state=lambda s: s[:, 1:]), "state shape: got (2, "),
    (partial(on_state, "stored_view", 0, state=lambda s: s[0]), "state shape: got ("),
    (
        partial(on_state, "stored_view", 0, state=lambda s: s.float()),
        "state dtype: got torch.float32; allowed: torch.uint8",
    ),
    (partial(on_state, "stored_view", 0, state=list), "state: got list; allowed: a tensor"),
    *((partial(on_state, "export_slot", i), f"slot: got {i}; allowed: 0 to 1") for i in (2, -1, 1.0, None)),
    (partial(on_state, "import_slot", 2, torch.zeros(LAYOUT.stored_bytes).byte()), "slot: got 2; allowed: 0 to 1"),
    (partial(on_state, "import_slot", 0, None), "data: got NoneType; allowed: a tensor"),
    (
        partial(on_state, "import_slot", 0, torch.zeros(3).byte()),
        "data shape: got (3,); allowed: (3968,), the stored rings",
    ),
    (partial(on_state, "import_slot", 0, torch.zeros(3)), "data dtype: got torch.float32; allowed: torch.uint8"),
    (partial(NO_SLOTS.free, None), "slot: got None; allowed: a Slot that `allocate` gave"),
    (partial(NO_SLOTS.free, swa.Slot(2, 1)), "slot: got Slot(id=2, generation=1); allowed: an id from 0 to 1"),
    (partial(NO_SLOTS.free, swa.Slot(0.5, 0)), "slot: got Slot(id=0.5, generation=0); allowed: an id from 0 to 1"),
    (partial(NO_SLOTS.free, swa.Slot(0, 0)), "slot: got Slot(id=0, generation=0), freed before; allowed: a live slot"),
    *((partial(NO_SLOTS.settle, n), f"step: got {n}; allowed: a launched step, up to 0") for n in (1, -1, "1")),
    *((partial(make, spec=None), "spec: got NoneType; allowed: a RingSpec") for make in (decode, prefill)),
    *((partial(make, num_slots=0), f"num_slots: got 0{INTEGER}") for make in (decode, prefill)),
    *((partial(make, num_slots=2**31), "num_slots: got 2147483648 of R=10; allowed:") for make in (decode, prefill)),
    *((partial(make, num_slots=1.5), f"num_slots: got 1.5{INTEGER}") for make in (decode, prefill)),
    *(
        (partial(make, state_ids=None), "state_ids: got None; allowed: a sequence, each an integer")
        for make in (decode, prefill)
    ),
    *((partial(make, state_ids=[0, 1.5]), "state_ids[1]: got 1.5; allowed: an integer") for make in (decode, prefill)),
    *(
        (partial(make, num_tokens=1.5), "num_tokens: got 1.5; allowed: an integer of at least 0")
        for make in (decode, prefill)
    ),
    *((partial(make, num_tokens=1), "num_tokens: got 1; allowed: None or at least the") for make in (decode, prefill)),
    *((partial(make, valid_start=[0]), "valid_start length: got 1; allowed: 2, that of") for make in (decode, prefill)),
    (partial(decode, positions=[1]), "positions length: got 1; allowed: 2, that of state_ids"),
    (partial(decode, positions=[1, "0"]), "positions[1]: got '0'; allowed: an integer"),
    (partial(decode, state_ids=[4, 0]), "state_ids[0]: got 4; allowed: -1 (padded row) to 3"),
    (partial(decode, state_ids=[0, -2]), "state_ids[1]: got -2; allowed: -1 (padded row) to 3"),
    (partial(decode, positions=[-1, 0]), "positions[0]: got -1; allowed: 0 and up"),
    (partial(decode, positions=[2**63, 0]), "positions[0]: got 9223372036854775808; allowed: 0 and up, below 2^63"),
    (partial(decode, valid_start=[51, 0]), "valid_start[0]: got 51; allowed: up to the position, 50"),
    (
        partial(decode, positions=[2**40, 0], valid_start=[2**31, 0]),
        "valid_start[0]: got 2147483648; allowed: up to the position, 1099511627776, below 2^31",
    ),
    (partial(decode, width=7), "width: got 7; allowed: None or at least window=8"),
    (partial(decode, width="8"), "width: got '8'; allowed: an integer of at least 1"),
    (partial(prefill, q_lens=[2]), "q_lens length: got 1; allowed: 2, that of state_ids"),
    (partial(prefill, k_lens=[2, 3, 4]), "k_lens length: got 3; allowed: 2, that of state_ids"),
    (partial(prefill, state_ids=[3, 4]), "state_ids[1]: got 4; allowed: -1 (padded) to 3"),
    (partial(prefill, state_ids=[-2, 0]), "state_ids[0]: got -2; allowed: -1 (padded) to 3"),
    (partial(prefill, q_lens=[2, -1]), "q_lens[1]: got -1; allowed: 0 and up"),
    (partial(prefill, k_lens=[50, 2]), "k_lens[1]: got 2; allowed: q_lens[1]=3 and up"),
    (partial(prefill, k_lens=[-1, 3]), "k_lens[0]: got -1; allowed: q_lens[0]=2 and up"),
    (partial(prefill, valid_start=[49, 0]), "valid_start[0]: got 49; allowed: up to q_start=48"),
    (
        partial(prefill, k_lens=[2**40, 3], valid_start=[2**31, 0]),
        f"valid_start[0]: got 2147483648; allowed: up to q_start={2**40 - 2}, below 2^31",
    ),
    (partial(swa.PreparedDecode.allocate, SPEC, -1), "batch: got -1; allowed: an integer of at least 0"),
    (partial(swa.PreparedDecode.allocate, SPEC, 1.5), "batch: got 1.5; allowed: an integer of at least 0"),
    (partial(swa.PreparedDecode.allocate, None, 1), "spec: got NoneType; allowed: a RingSpec"),
    (partial(swa.PreparedDecode.allocate, SPEC, 1, width=7), "width: got 7; allowed: None or at least window=8"),
]


def test_on_the_host() -> None:
    """A7, F14: specs, layouts, slots and metadata of lists; nothing is repaired in silence."""
    for call, text in HOST:
        assert refused(call, (text,), {}).startswith(text)
