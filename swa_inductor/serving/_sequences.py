"""What a decode step knows of every sequence, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from swa_inductor.errors import require


class SequenceState:
    """State of the sequence in each slot, in tensors that keep their address and are written in place.

    Entry S, one behind the last slot, belongs to padded rows: a sequence of length 0 and limit 0, finished for ever.

    With first = lengths + accepted: the records of positions below `first` are stored and settled, and token `first` is
    the pending one, sampled but not stored. The sequence is finished once first + 1 >= limits.

    Attributes:
        lengths: int64 [S + 1], settled tokens at the start of the last step that ran the sequence.
        accepted: int32 [S + 1], tokens that this step settled, 1 to D; 0 if none has run since admission.
        tokens: int64 [S + 1, max_length + D], prompt and generated tokens, the pending one included; then anything.
        limits: int64 [S + 1], tokens, prompt and generated, at which the sequence is finished; EOS lowers it.
        valid_start: int32 [S + 1], first position that may be read.
    """

    def __init__(self, num_slots: int, max_length: int, tokens_per_step: int, device: torch.device | str) -> None:
        for name, value in (("num_slots", num_slots), ("max_length", max_length)):
            require(isinstance(value, int) and value >= 1, name, value, "an integer of at least 1")
        entries = num_slots + 1
        self.lengths = torch.zeros(entries, dtype=torch.int64, device=device)
        self.accepted = torch.zeros(entries, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(entries, max_length + tokens_per_step, dtype=torch.int64, device=device)
        self.limits = torch.zeros(entries, dtype=torch.int64, device=device)
        self.valid_start = torch.zeros(entries, dtype=torch.int32, device=device)

    def tensors(self) -> list[Tensor]:
        """All of them, in the order of the attributes."""
        return [self.lengths, self.accepted, self.tokens, self.limits, self.valid_start]
