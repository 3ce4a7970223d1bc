"""What a model must offer in order to be served."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swa_inductor.metadata import DecodeMetadata, PrefillMetadata
from swa_inductor.spec import RingSpec


class SlotModel(Protocol):
    """A decoder whose layers keep the keys and values of `num_slots` sequences in rings.

    Both forwards take the tokens of several sequences in one packed row, with a state id per token, -1 for padding.
    `torch.compile(fullgraph=True)` takes them, and with fixed T compiles them once; compiled or captured in a CUDA
    graph, they read no values on the host. Neither keeps anything about a sequence but its records: how long it is
    stands in the metadata.

    Attributes:
        spec: the ring with the smallest window, for which metadata is made; its `tokens_per_step` is D.
        num_slots: sequences at a time (S).
        max_length: tokens of a sequence at most, prompt and generated.
        vocab_size: V, values of a row of logits; token ids are 0 to V - 1.
        device: where its rings and parameters are.
    """

    spec: RingSpec
    num_slots: int
    max_length: int
    vocab_size: int
    device: torch.device

    @property
    def state_bytes(self) -> int:
        """Bytes of the rings of all slots and layers."""

    def full_kv_bytes(self, tokens: int) -> int:
        """Bytes that keys and values of `tokens` tokens take over all layers where every layer keeps all of them."""

    def decode(self, tokens: Tensor, metadata: DecodeMetadata) -> Tensor:
        """Store the new tokens, then attend.

        Args:
            tokens: int64 [T], T = B * D: the D tokens of a sequence together, at consecutive positions. Those of padded
                rows may be any token ids.
            metadata: of T rows, made for `spec`; without an index.

        Returns:
            Logits [T, V]; rows of padding hold anything finite.
        """

    def prefill(self, tokens: Tensor, metadata: PrefillMetadata, last: Tensor) -> Tensor:
        """Attend over history and new tokens, then store the new tokens.

        Args:
            tokens: int64 [T], the tokens of a sequence together, in order of position.
            metadata: of T tokens, made for `spec`.
            last: int64 [N], the rows, 0 to T - 1, whose logits are wanted. Pad it with any row: N is a shape.

        Returns:
            Logits [N, V].
        """
