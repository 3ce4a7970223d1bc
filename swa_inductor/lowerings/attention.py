"""Lowerings of swa_inductor::attention: one Triton kernel on CUDA; on the CPU the op stays a call of the eager code.

Where _attention_sm90.py serves, the kernel is in Gluon.
"""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _attend, _attention_sm90, _inductor
from swa_inductor.lowerings._template import next_power_of_2, source, vector_block
from swa_inductor.reference_query import Query


def grid(tokens: Any, kv_heads: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return (cdiv(tokens, meta["D"]) * meta["ROW_BLOCKS"], kv_heads, meta["SPLITS"])


FILL = 2
"""Programs for each multiprocessor that a split of keys makes at most."""


def splits(programs: int | None, keys: int, block_n: int, processors: int) -> int:
    """Programs that share the keys of the same rows, so that a small batch fills the GPU: two tiles or more for each.

    512 keys of 1 KB took one program 45 us and eight 9 us (H200, 2026-11-30). `programs`: those of an unsplit launch,
    None where the number of tokens is not known at compile time.
    """
    return 1 if programs is None else max(1, min(FILL * processors // max(programs, 1), keys // (2 * block_n)))


def whole_share(options: dict[str, Any], keys: int, shares: int) -> dict[str, Any]:
    """Options for programs of 16 rows that share keys, two tiles each: both tiles at once."""
    block_n = options["BLOCK_N"]
    if shares > 1 and keys <= 2 * shares * block_n and options["BLOCK_M"] == 16 and options["num_stages"] > 1:
        return options | {"BLOCK_N": 2 * block_n, "num_stages": 2}
    return options


def resident_rows(rows: int, steps: int | None, processors: int) -> int:
    """Rows of a program that keeps its whole window: 64 where few are known to come, for all of them to run at once."""
    few = rows <= 64 or (steps is not None and steps * -(-rows // 64) <= processors)
    return 64 if few else 128


def tokens_in(block_m: int, groups: int, tokens_per_step: int) -> int:
    """Tokens of a step that have rows in a program at most: as few as can be where rows and heads divide each other."""
    aligned = block_m % groups == 0 or groups % block_m == 0
    return min(-(-block_m // groups) if aligned else (block_m - 2) // groups + 2, tokens_per_step)


TEMPLATE = _inductor.triton_template("attention", grid, source("attention"))


def lower_cuda(
    q: Any,
    cache: Any,
    state_ids: Any,
    positions: Any,
    valid_start: Any = None,
    sinks: Any = None,
    q_norm_weight: Any = None,
    rope: Any = None,
    *,
    window: int,
    scale: float,
    kv_format: str,
    v_head_dim: int | None = None,
    tokens_per_step: int = 1,
    softcap: float | None = None,
    return_lse: bool = False,
    **query: Any,
) -> tuple[Any, Any]:
    dim, kv_heads = _inductor.int_of(q.get_size()[2]), _inductor.int_of(cache.get_size()[2])
    groups = _inductor.int_of(q.get_size()[1]) // kv_heads
    around = Query(q_norm_weight, rope, **query)
    rows = tokens_per_step * groups
    card = torch.cuda.get_device_properties(q.get_device())
    inputs = [x for x in (q, cache, state_ids, positions, valid_start) if x is not None]
    if kv_format == "mxfp8" and v_head_dim is None and softcap is None:
        if _attention_sm90.serves(q, cache, around, window, scale, tokens_per_step, card):
            return _attention_sm90.lower(
                inputs,
                sinks,
                around,
                window=window,
                scale=scale,
                step=tokens_per_step,
                has_valid_start=valid_start is not None,
                return_lse=return_lse,
                processors=card.multi_processor_count,
            )
    tokens = _inductor.known_int(q.get_size()[0])
    steps = None if tokens is None else tokens // tokens_per_step * kv_heads
    options, shares = None, 1
    if rows > 32 and v_head_dim is None:
        block_m = resident_rows(rows, steps, card.multi_processor_count)
        held = tokens_in(block_m, groups, tokens_per_step)
        options = _attend.resident(block_m, held, dim, window, q.get_dtype(), card, around)
    if options is None:
        keys = window + tokens_per_step - 1
        options = _attend.config(rows, vector_block(max(dim, v_head_dim or 0)), q.get_dtype(), card, keys) | {
            "TILES": ()
        }
        programs = None if steps is None else steps * -(-rows // options["BLOCK_M"])
        shares = splits(programs, keys, options["BLOCK_N"], card.multi_processor_count)
        options = whole_share(options, keys, shares)
    row_blocks = -(-rows // options["BLOCK_M"])
    scratch: list[Any] = []
    if shares > 1:
        part = options["BLOCK_M"] * (vector_block(dim if v_head_dim is None else v_head_dim) + 2)
        scratch = [
            _inductor.empty_buffer([steps * row_blocks, shares, part], torch.float32, q.get_device()),
            _inductor.counters(q.get_device(), FILL * card.multi_processor_count),
        ]

    def example_ids(size: list[int], device: torch.device) -> torch.Tensor:
        slots = _inductor.likely_int(cache.get_size()[0], 1)
        return (torch.arange(size[0], device=device) // tokens_per_step % slots).int()

    def example_positions(size: list[int], device: torch.device) -> torch.Tensor:
        return window + torch.arange(size[0], device=device) % tokens_per_step  # the window is full

    return _attend.launch(
        TEMPLATE,
        inputs,
        sinks,
        dims=(dim, v_head_dim),
        kv_heads=kv_heads,
        cache=cache,
        kv_format=kv_format,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        query=around,
        options=options,
        variants=() if options["TILES"] else _attend.variants(options),
        examples={2: example_ids, 3: example_positions},
        D=tokens_per_step,
        G=groups,
        scratch=scratch,
        SPLITS=shares,
        SPLITS_BLOCK=next_power_of_2(shares),
        ROW_BLOCKS=row_blocks,
        WINDOW=window,
        HAS_VALID_START=valid_start is not None,
    )


_inductor.lower(torch.ops.swa_inductor.attention.default, cuda=lower_cuda, cpu=None)
