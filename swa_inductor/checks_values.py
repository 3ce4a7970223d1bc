"""The checks that look into metadata: only on real CPU tensors, where that costs no device synchronisation.

On a device, bad metadata makes a row a padded row (see reference.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from swa_inductor.errors import require


def check_sequences(
    num_slots: int,
    num_tokens: int,
    state_ids: Sequence[int],
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    valid_start: Sequence[int] | None,
) -> None:
    """Values of the metadata of a prefill. A padded sequence (slot -1) may hold anything but a negative q_len."""
    for i, slot in enumerate(state_ids):
        require(-1 <= slot < num_slots, f"state_ids[{i}]", slot, f"-1 (padded) to {num_slots - 1}")
        require(q_lens[i] >= 0, f"q_lens[{i}]", q_lens[i], "0 and up")
        if slot >= 0:
            q_start = k_lens[i] - q_lens[i]
            good = 0 <= q_start and k_lens[i] < 2**63
            require(good, f"k_lens[{i}]", k_lens[i], f"q_lens[{i}]={q_lens[i]} and up (new tokens count)")
            if valid_start is not None:
                good = valid_start[i] <= q_start and valid_start[i] < 2**31
                require(good, f"valid_start[{i}]", valid_start[i], f"up to q_start={q_start}, below 2^31")
    require(sum(q_lens) <= num_tokens, "q_lens", f"{sum(q_lens)} tokens", f"num_tokens={num_tokens} at most")


def readable(t: torch.Tensor) -> bool:
    """Whether values can be read without a device synchronisation: a real tensor on the CPU."""
    return t.device.type == "cpu" and not isinstance(t, FakeTensor)


def check_values(
    cache: torch.Tensor,
    state_ids: torch.Tensor,
    positions: torch.Tensor,
    valid_start: torch.Tensor | None = None,
    tokens_per_step: int = 1,
) -> None:
    """Values of the metadata, read only where that needs no device synchronisation: real tensors on the CPU."""
    check_rows(cache.shape[0], state_ids, positions, valid_start)
    if tokens_per_step > 1 and readable(state_ids) and state_ids.numel():
        s, p = state_ids.view(-1, tokens_per_step), positions.view(-1, tokens_per_step)
        first = s.argmax(1, keepdim=True)  # any live row of the step: all share one slot, positions count up by one
        base = p.gather(1, first) - first
        steps = base + torch.arange(tokens_per_step)
        ok = (s < 0) | ((s == s.gather(1, first)) & (p == steps))
        require(
            bool(ok.all()),
            "positions",
            "a step that mixes slots or skips a position",
            f"{tokens_per_step} consecutive positions of one slot per step (padded rows apart)",
        )


def check_rows(
    slots: int, state_ids: torch.Tensor, positions: torch.Tensor, valid_start: torch.Tensor | None = None
) -> None:
    """Values of the metadata of single rows, where they are readable."""
    if not readable(state_ids) or state_ids.numel() == 0:
        return
    if valid_start is None:  # a decode step on the CPU: for a few rows, lists cost a tenth of tensor operations
        rows = list(zip(state_ids.tolist(), positions.tolist(), strict=True))
        if all(s == -1 or (0 <= s < slots and p >= 0) for s, p in rows):
            return
    require(bool((state_ids < slots).all()), "state_ids", int(state_ids.max()), f"-1 (padded row) to {slots - 1}")
    require(bool((state_ids >= -1).all()), "state_ids", int(state_ids.min()), f"-1 (padded row) to {slots - 1}")
    live = state_ids >= 0
    require(bool((positions[live] >= 0).all()), "positions", "a negative position", "0 and up where state_ids >= 0")
    if valid_start is not None:
        late = live & (valid_start > positions)
        require(not bool(late.any()), "valid_start", "a start after the query", "valid_start <= positions")


def check_new_rows(state_ids: torch.Tensor, positions: torch.Tensor, q_starts: torch.Tensor) -> None:
    """The tokens of each sequence stand together, from its q_start on."""
    if not readable(state_ids) or state_ids.numel() == 0:
        return
    live = state_ids >= 0
    token = torch.arange(len(state_ids))
    first = token - (positions - q_starts)
    inside = (q_starts >= 0) & (q_starts <= positions) & (first >= 0)
    at = torch.where(inside, first, token)
    good = inside & (state_ids[at] == state_ids) & (positions[at] == q_starts)
    allowed = "the position of the first token of the sequence in this call, whose tokens stand together"
    require(bool((good | ~live).all()), "q_starts", q_starts[live & ~good][:1].tolist(), allowed)
