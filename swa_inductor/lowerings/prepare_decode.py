"""Lowerings of swa_inductor::prepare_decode and its `out` overload: one Triton kernel on CUDA, C++ loops on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from swa_inductor import reference_inline
from swa_inductor.lowerings import _inductor
from swa_inductor.lowerings._template import next_power_of_2, source
from swa_inductor.meta import prepare_decode as meta


def config(width: int | None) -> dict[str, int]:
    """A program writes 2048 elements of the index, or the rows of 128 tokens where there is no index."""
    columns = 1 if width is None else min(next_power_of_2(width), 128)
    rows = 128 if width is None else 2048 // columns
    return {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_B": 512, "num_warps": 4, "num_stages": 1}


def grid(sequences: Any, tokens_per_step: int, width: int, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    """One program beside those of the rows, for the count: it runs even where B = 0."""
    return (1 + cdiv(sequences * tokens_per_step, meta["BLOCK_M"]), max(1, cdiv(width, meta["BLOCK_N"])), 1)


TEMPLATE = _inductor.triton_template("prepare_decode", grid, source("prepare_decode"))


def launch(
    inputs: tuple[Any, ...],
    outputs: list[Any],
    *,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None,
    add_errors: bool,
) -> None:
    given = [x for x in inputs if x is not None]
    device = given[0].get_device()
    nodes = [*given, *outputs]
    _inductor.render_template(
        TEMPLATE,
        nodes,
        _inductor.fixed_layout(device, torch.int8, [1]),
        mutated=range(len(given), len(nodes)),
        call_sizes=[inputs[2].get_size()[0], tokens_per_step, width or 0],
        **config(width),  # type: ignore[arg-type]
        D=tokens_per_step,
        W=window,
        R=ring_rows,
        NUM_SLOTS=num_slots,
        WIDTH=width or 0,
        LENGTH_LIMIT=reference_inline.LENGTH_LIMIT,
        HAS_VALID_START=inputs[3] is not None,
        HAS_DRAFT_COUNTS=inputs[4] is not None,
        ADD_ERRORS=add_errors,
    )


def lower_cuda(
    lengths: Any,
    accepted: Any,
    state_ids: Any,
    valid_start: Any = None,
    draft_counts: Any = None,
    *,
    width: int | None = None,
    **geometry: Any,
) -> tuple[Any, ...]:
    forms = meta.results(state_ids.get_size()[0], geometry["tokens_per_step"], width)
    device = state_ids.get_device()
    out = {name: _inductor.empty_buffer(shape, dtype, device) for name, (shape, dtype) in forms.items()}
    written = [buffer for name, buffer in out.items() if name != "index" or width is not None]
    inputs = (lengths, accepted, state_ids, valid_start, draft_counts)
    launch(inputs, written, width=width, **geometry, add_errors=False)
    return tuple(out.values())


def lower_cpu(
    lengths: Any,
    accepted: Any,
    state_ids: Any,
    valid_start: Any = None,
    draft_counts: Any = None,
    *,
    width: int | None = None,
    **geometry: Any,
) -> tuple[Any, ...]:
    fn = partial(reference_inline.prepare_decode, width=width, **geometry)
    *rows, index, new_lengths, errors = _inductor.inline(fn, lengths, accepted, state_ids, valid_start, draft_counts)
    if width is None:
        index = _inductor.empty_buffer([0], torch.int32, state_ids.get_device())
    return *rows, index, new_lengths, errors


def lower_out_cuda(
    lengths: Any,
    accepted: Any,
    state_ids: Any,
    valid_start: Any = None,
    draft_counts: Any = None,
    *,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
    **out: Any,
) -> None:
    launch(
        (lengths, accepted, state_ids, valid_start, draft_counts),
        [buffer for buffer in out.values() if buffer is not None],
        tokens_per_step=tokens_per_step,
        window=window,
        ring_rows=ring_rows,
        num_slots=num_slots,
        width=width,
        add_errors=True,
    )


def lower_out_cpu(
    lengths: Any,
    accepted: Any,
    state_ids: Any,
    valid_start: Any = None,
    draft_counts: Any = None,
    *,
    tokens_per_step: int,
    window: int,
    ring_rows: int,
    num_slots: int,
    width: int | None = None,
    **out: Any,
) -> None:
    geometry = (tokens_per_step, window, ring_rows, num_slots, width)

    def fn(errors: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
        *values, count = reference_inline.prepare_decode(*(*inputs, *geometry))
        # A result that another one reads would get a buffer of its own, were it not cloned.
        return *(value.clone() for value in values), errors + count

    values = _inductor.inline(fn, out["errors"], lengths, accepted, state_ids, valid_start, draft_counts)
    for buffer, value in zip(out.values(), values, strict=True):
        if buffer is not None:
            _inductor.copy_to(buffer, value)


_inductor.lower(torch.ops.swa_inductor.prepare_decode.default, cuda=lower_cuda, cpu=lower_cpu)
_inductor.lower(torch.ops.swa_inductor.prepare_decode.out, cuda=lower_out_cuda, cpu=lower_out_cpu)
