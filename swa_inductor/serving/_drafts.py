"""Drafts without a draft model: what followed the last tokens when they last occurred, and which drafts hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def lookup(history: Tensor, last: Tensor, ngram: int, drafts: int) -> tuple[Tensor, Tensor]:
    """Prompt lookup: the tokens after the latest earlier occurrence of the last n, for the largest n that has one.

    One pass over the history that fuses into a reduction; plain torch, without a synchronisation.

    Args:
        history: int64 [B, L], tokens of each sequence, none negative.
        last: int64 [B], column of the last token of each sequence; what stands behind it has no influence.
        ngram: largest n; the smallest is 1.
        drafts: columns of the result, at least 1.

    Returns:
        tokens: int64 [B, drafts], 0 where there is no draft. counts: int32 [B], drafts of each sequence: `drafts`,
        fewer where the occurrence ends less than that before the last token, 0 where the last token is a new one.
    """
    width = history.shape[1]
    column = torch.arange(width, device=history.device)
    run = torch.ones_like(history, dtype=torch.bool)  # the last k + 1 tokens end in this column
    matched = torch.zeros_like(history)
    for k in range(min(ngram, width)):
        earlier = F.pad(history[:, : width - k], (k, 0), value=-1)  # k columns to the left
        run = run & (earlier == history.gather(1, (last[:, None] - k).clamp(min=0)))
        matched = matched + run
    # The longest run, then the latest, is the largest number.
    best = torch.where((column < last[:, None]) & (matched > 0), matched * width + column, -1).amax(1)
    end = best.remainder(width)
    counts = torch.where(best < 0, 0, (last - end).clamp(max=drafts))
    offset = torch.arange(drafts, device=history.device)
    tokens = history.gather(1, (end[:, None] + 1 + offset).clamp(max=width - 1))
    return torch.where(offset < counts[:, None], tokens, 0), counts.to(torch.int32)


def verify(tokens: Tensor, sampled: Tensor, counts: Tensor, room: Tensor, eos_token_id: int | None) -> Tensor:
    """Tokens that a step settles: the sampled ones up to the first that is not the draft behind it.

    Args:
        tokens: int64 [B, D], what the step ran: the pending token, then drafts.
        sampled: int64 [B, D], the token after each of them.
        counts: int32 [B], drafts of each sequence, 0 to D - 1.
        room: int64 [B], tokens that the sequence may still take.
        eos_token_id: token behind which nothing is kept.

    Returns:
        int32 [B], the first tokens of `sampled` that are kept: 1 to D, at most `room`, and at least 0.
    """
    goes_on = tokens[:, 1:] == sampled[:, :-1]
    if eos_token_id is not None:
        goes_on = goes_on & (sampled[:, :-1] != eos_token_id)
    runs = torch.ones_like(counts, dtype=torch.bool)
    kept = torch.ones_like(counts)
    for j in range(sampled.shape[1] - 1):  # few: unrolled, it fuses, where a scan would be a kernel
        runs = runs & (j < counts) & goes_on[:, j]
        kept = kept + runs
    return torch.minimum(kept, room).clamp(min=0).to(torch.int32)
