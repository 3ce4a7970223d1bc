"""Contracts: schema, fake and eager implementation of each op. One file per op; torch only.

Importing this package registers the ops under `torch.ops.swa_inductor`. The same order in every file: SCHEMA, the fake,
the eager implementation, `define`.
"""

from swa_inductor.meta import (
    attention,
    attention_index,
    attention_prefill,
    attention_workspace,
    decode_index,
    gather,
    norm_store,
    prefill_index,
    prefill_plan,
    prepare_decode,
    ring_read_raw,
    store,
    store_cast_back,
)

__all__ = [
    "attention",
    "attention_index",
    "attention_prefill",
    "attention_workspace",
    "decode_index",
    "gather",
    "norm_store",
    "prefill_index",
    "prefill_plan",
    "prepare_decode",
    "ring_read_raw",
    "store",
    "store_cast_back",
]
