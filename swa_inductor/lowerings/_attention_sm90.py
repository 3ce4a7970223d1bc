"""The choice of the Gluon kernel for attention in a decode step on sm_90: shapes, configurations."""

from __future__ import annotations

import functools
import math
from importlib.resources import files
from typing import Any

import torch

from swa_inductor.lowerings import _inductor


def config(sequences: int | None, step: int, heads: int) -> dict[str, Any]:
    """Tokens and heads of a program, for `sequences` (None: not known at compile time) of `step` tokens."""
    return dict(WARPS=8, TOKENS=step, HEADS=min(heads, 128), SPLITS=0, SLICE=128, AHEAD=2)


def grid(programs: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (programs * meta["HEAD_BLOCKS"] * max(meta["SPLITS"], 1) // meta["TOKENS"], 1, 1)


@functools.cache
def template() -> Any:
    from swa_inductor.lowerings import _gluon

    source = (files("swa_inductor") / "templates" / "_attention_sm90.py.jinja").read_text()
    return _gluon.template("attention_sm90", grid, source)


def lower(
    inputs: list[Any],
    sinks: Any,
    *,
    cache: Any,
    window: int,
    scale: float,
    step: int,
    has_valid_start: bool,
    return_lse: bool,
    rope: Any = None,
    q_norm_eps: float | None = None,
    inverse_rope: bool = False,
) -> tuple[Any, Any]:
    q = inputs[0]
    tokens, heads, dim = q.get_size()
    heads, dim = _inductor.int_of(heads), _inductor.int_of(dim)
    known = _inductor.known_int(tokens)
    options = config(None if known is None else known // step, step, heads)
    warps = options["WARPS"]
    rows = 64 if options["SPLITS"] else 16 * warps
    held = options["TOKENS"] * options["HEADS"]
    device, dtype = q.get_device(), q.get_dtype()
    lse = _inductor.empty_buffer([tokens, heads] if return_lse else [0], torch.float32, device)
    read = [*inputs, *(x for x in (sinks, rope) if x is not None)]
    nodes = [*read, *([lse] if return_lse else [])]
    out = _inductor.render_template(
        template(),
        nodes,
        _inductor.fixed_layout(device, dtype, [tokens, heads, dim]),
        mutated=range(len(read), len(nodes)),
        call_sizes=[tokens],
        num_warps=warps,
        num_stages=1,
        **options,
        ROWS=rows,
        HEAD_BLOCKS=heads // options["HEADS"],
        TRIPS=-(-held // rows),
        EVEN=held % rows == 0,
        K_DIM=dim,
        WINDOW=window,
        SCALE=float(scale),
        LOG2E=math.log2(math.e),
        HAS_VALID_START=has_valid_start,
        HAS_SINKS=sinks is not None,
        HAS_LSE=return_lse,
        Q_NORM_EPS=float(q_norm_eps or 0.0),
        ROPE_DIM=0 if rope is None else _inductor.int_of(rope.get_size()[1]),
        INVERSE_ROPE=inverse_rope,
    )
    return out, lse
