"""The part of the demo with drafts: greedy decoding that checks looked-up tokens, beside one token at a time.

Both sides are a `DecodeStep` of the same model with the same prompts, compiled for the batch size. Nothing cleans up
behind a rejected draft: the next step writes the same rows of the rings before anyone reads them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from swa_inductor._environment import waiting
from swa_inductor.demo import near_tie
from swa_inductor.metadata import PrefillMetadata
from swa_inductor.serving import DecodeStep, SlotModel


@dataclass
class Side:
    """What one side did. `tokens` start with that of the prefill; a row is one sequence of a step that ran it.

    ms_per_step: median, from the tokens of one step to those of the next. tokens_per_step: of a row.
    ms_per_token: of a sequence, the quotient of both. compiled_buckets, recordings: of its `DecodeStep`.
    """

    tokens: list[list[int]]
    steps: int
    tried_drafts: int
    accepted_drafts: int
    ms_per_step: float
    tokens_per_step: float
    ms_per_token: float
    compiled_buckets: int
    recordings: int


@dataclass
class DraftReport:
    """Decoding with up to `drafts` drafts per step, beside plain decoding.

    acceptance_rate: share of the drafts tried, None if there was none. differing: sequences whose tokens differ;
    clear_misses: those whose first difference is no near tie (NEAR_TIE), as stock sees it.
    """

    drafts: int
    plain: Side
    drafted: Side
    acceptance_rate: float | None
    speed_up: float
    identical: bool
    differing: int
    clear_misses: int
    passed: bool
    verdict: str


def judge(drafts: int, differing: int, clear_misses: int, dtype: str, kv_format: str) -> tuple[bool, str]:
    """Whether the run passes, and why: in fp32 the same tokens; in half precision the same but for near ties."""
    what = f"{drafts} drafts per step: tokens"
    if not differing:
        return True, f"{what} identical to plain decoding."
    what += f" of {differing} sequences differ from plain decoding"
    if kv_format != dtype:
        return True, f"{what}; rings in {kv_format}, model in {dtype}."
    if dtype == "fp32":
        return False, f"{what}."
    if clear_misses:
        return False, f"{what}, {clear_misses} by more than {dtype} rounding."
    return True, f"{what} only where {dtype} rounding decides between near ties."


def run_drafts(
    model: Any, prompts: Sequence[list[int]], *, drafts: int, count: int, dtype: str, kv_format: str, console: Console
) -> DraftReport:
    """`count` tokens for each prompt, once plain and once with drafts; the model has its stock attention afterwards."""
    from swa_inductor.integrations.transformers import TransformersSlotModel, use_stock

    sides = []
    for width, name in ((1, "plain"), (drafts + 1, f"{drafts} drafts")):
        torch.compiler.reset()
        slots = TransformersSlotModel(
            model,
            num_slots=len(prompts),
            max_length=max(map(len, prompts)) + count,
            tokens_per_step=width,
            kv_format=kv_format,
        )
        sides.append(decode(slots, prompts, count, console, name))
    plain, drafted = sides
    use_stock(model)
    pairs = list(zip(prompts, plain.tokens, drafted.tokens, strict=True))
    differing = sum(a != b for _, a, b in pairs)
    clear_misses = sum(is_clear_miss(model, *pair) for pair in pairs)
    passed, verdict = judge(drafts, differing, clear_misses, dtype, kv_format)
    return DraftReport(
        drafts,
        plain,
        drafted,
        acceptance_rate=drafted.accepted_drafts / drafted.tried_drafts if drafted.tried_drafts else None,
        speed_up=plain.ms_per_token / drafted.ms_per_token,
        identical=not differing,
        differing=differing,
        clear_misses=clear_misses,
        passed=passed,
        verdict=verdict,
    )


def prefill(model: SlotModel, prompts: Sequence[list[int]]) -> Tensor:
    """Store all prompts, that of sequence b in slot b -> logits [B, V] behind each."""
    lengths = list(map(len, prompts))
    metadata = PrefillMetadata.build(
        model.spec,
        num_slots=model.num_slots,
        state_ids=range(len(prompts)),
        q_lens=lengths,
        k_lens=lengths,
        device=model.device,
    )
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    return model.prefill(tokens, metadata, torch.tensor(lengths, device=model.device).cumsum(0) - 1)


def decode(model: SlotModel, prompts: Sequence[list[int]], count: int, console: Console, name: str) -> Side:
    """Greedy decoding: a step is launched before the tokens of the step before it are read."""
    step = DecodeStep(model, buckets=[len(prompts)])
    slots = list(range(len(prompts)))
    with waiting(console, f"{name}: prefill of {sum(map(len, prompts))} tokens"):
        first = step.sample_first(prefill(model, prompts))
        tokens = step.admit(slots, prompts, first, limits=[len(prompt) + count for prompt in prompts]).read().tokens
    with waiting(console, f"{name}: compiles"):
        step.warm_up()
    rows = tried = accepted = 0
    read_at = [time.perf_counter()]
    with waiting(console, f"{name}: tokens", len(prompts) * (count - 1)) as advance:
        result, finished = step.launch(slots), False
        while not finished:
            following = step.launch(slots)
            read = result.read()
            read_at.append(time.perf_counter())
            if any(read.refused):
                raise RuntimeError(f"{name}: the state of a sequence on the device is not valid")
            for sequence, new in zip(tokens, read.tokens, strict=True):
                sequence += new
                rows += bool(new)
            for _ in range(sum(map(len, read.tokens))):
                advance()
            tried += sum(read.drafts)
            accepted += sum(read.accepted_drafts)
            result, finished = following, all(read.finished)
        result.read()  # of a step of finished sequences: it has run
    ms = 1000 * statistics.median(b - a for a, b in zip(read_at, read_at[1:], strict=False))
    per_step = len(prompts) * (count - 1) / rows
    return Side(
        tokens,
        len(read_at) - 1,
        tried,
        accepted,
        ms_per_step=ms,
        tokens_per_step=per_step,
        ms_per_token=ms / per_step,
        compiled_buckets=step.compiles,
        recordings=step.recordings,
    )


def is_clear_miss(model: Any, prompt: list[int], plain: list[int], drafted: list[int]) -> bool:
    """Whether the tokens differ and one of the first two that do is no near tie of stock's choice, a forward says."""
    at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
    if at is None:
        return False
    ids = torch.tensor([prompt + plain[:at]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    top = logits.max()
    margin = top - torch.minimum(logits[plain[at]], logits[drafted[at]])
    return bool(margin > near_tie(top, model.dtype))
