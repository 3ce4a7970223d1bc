"""attention in a decode step on sm_90, as a Gluon kernel: the shapes that it serves, and how programs share them."""

from __future__ import annotations

import functools
import math
from importlib.resources import files
from typing import Any

import torch

from swa_inductor.lowerings import _inductor, _template
from swa_inductor.reference_query import Query

SLICE = 128
"""Columns that a program loads, multiplies or writes at a time."""

KEYS = 128
"""Keys of a tile; a program of several tokens has a second one for 16 more."""


@functools.cache
def template() -> Any:
    """The template, or None where this Triton has no Gluon as the kernel is written in."""
    try:
        from swa_inductor.lowerings import _gluon, _sm90  # noqa: F401
    except (ImportError, AttributeError):
        return None
    source = (files("swa_inductor") / "templates" / "_attention_sm90.py.jinja").read_text()
    return _gluon.template("attention_sm90", grid, source)


def grid(tokens: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (tokens // meta["TOKENS"] * meta["HEAD_BLOCKS"], max(meta["SPLITS"], 1), 1)


def serves(q: Any, cache: Any, query: Query, window: int, scale: float, step: int, card: Any) -> bool:
    """Whether the kernel serves vectors K = V in mxfp8 of this geometry; other cards and shapes are Triton's."""
    q_strides = q.maybe_get_stride()
    if q_strides is None:
        return False  # q is yet to be computed, by code that fuses in front of the Triton template
    strides: list[Any] = [*_inductor.known_strides(cache)[:3], *(_inductor.known_int(x) for x in q_strides)]
    if (card.major, card.minor) != (9, 0) or None in strides or not _template.GLUON or template() is None:
        return False
    if query.q_norm_weight is not None or (query.rope is not None and not _serves_rope(query)):
        return False
    _, heads, dim = q.get_size()
    slot, row, head = strides[:3]
    ring_bytes = _inductor.int_of(cache.get_size()[1]) * row
    return (
        q.get_dtype() == torch.bfloat16
        and _inductor.int_of(dim) == 512
        and _inductor.int_of(heads) // _inductor.int_of(cache.get_size()[2]) % 64 == 0
        and KEYS // 2 < window <= KEYS
        and step <= 16
        and scale > 0
        and slot % 16 == row % 16 == head % 16 == 0  # codes are read 16 bytes at a time
        and ring_bytes < 2**31
        and strides[5] == 1
        and strides[3] % 8 == strides[4] % 8 == 0
    )


def _serves_rope(query: Query) -> bool:
    """Pairs of adjacent columns, all in the last slice."""
    known = _inductor.known_strides(query.rope)[0] is not None
    return known and query.rope_interleaved and _inductor.int_of(query.rope.get_size()[1]) <= SLICE


def config(sequences: int | None, step: int, heads: int, group: int, processors: int) -> dict[str, Any]:
    """How programs share `sequences` (None: not known at compile time) of `step` tokens x `heads` heads.

    A wave of one-token programs at first, then as few tokens per program as make one wave, then whole steps. Steps of 6
    x 64 heads took 9.6, 10.5, 31 and 94 us for 1, 8, 64 and 256 sequences where the Triton template took 14.7, 16.5,
    44.7 and 130; of 6 x 128 heads, 50 and 172 for the last two, where it took 63 and 236 (H200, 2026-11-30).
    """
    if sequences is not None:
        programs = sequences * step * heads // 64
        for splits in (4, 2, 1):
            if programs * splits <= processors:
                return {"TOKENS": 1, "HEADS": 64, "SPLITS": splits, "AHEAD": 2}
    held = 128 if group % 128 == 0 else 64
    tokens = step
    if sequences is not None:
        waves = [t for t in range(1, step) if step % t == 0 and sequences * step // t * heads // held <= processors]
        tokens = waves[0] if waves else step
    return {"TOKENS": tokens, "HEADS": held, "SPLITS": 0, "AHEAD": 1}


def lower(
    inputs: list[Any],
    sinks: Any,
    query: Query,
    *,
    window: int,
    scale: float,
    step: int,
    has_valid_start: bool,
    return_lse: bool,
    processors: int,
) -> tuple[Any, Any]:
    """As lowerings.attention.lower_cuda; `inputs`: q, cache, state_ids, positions and, if there, valid_start."""
    q, cache = inputs[:2]
    tokens, heads, dim = q.get_size()
    heads, dim = _inductor.int_of(heads), _inductor.int_of(dim)
    group = heads // _inductor.int_of(cache.get_size()[2])
    known = _inductor.known_int(tokens)
    options = config(None if known is None else known // step, step, heads, group, processors)
    rows, held = 64 if options["SPLITS"] else 128, options["TOKENS"] * options["HEADS"]
    lse = _inductor.empty_buffer([tokens, heads] if return_lse else [0], torch.float32, q.get_device())
    read = [*inputs, *(x for x in (sinks, query.rope) if x is not None)]
    nodes = [*read, *([lse] if return_lse else [])]
    out = _inductor.render_template(
        template(),
        nodes,
        _inductor.fixed_layout(q.get_device(), q.get_dtype(), [tokens, heads, dim]),
        mutated=range(len(read), len(nodes)),
        call_sizes=[tokens],
        num_warps=8,
        num_stages=1,
        **options,
        WARPS=8,
        ROWS=rows,
        SLICE=SLICE,
        GROUP=group,
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
        Q_NORM_EPS=float(query.q_norm_eps or 0.0),
        ROPE_DIM=0 if query.rope is None else _inductor.int_of(query.rope.get_size()[1]),
        INVERSE_ROPE=query.inverse_rope,
    )
    return out, lse
