"""Inductor lowerings, one file per op. Importing this package registers them and tags the compile caches.

The same order in every file: the launch configuration, the grid, the template, the lowering of each device.
"""

import swa_inductor.meta  # noqa: F401  the ops exist before their lowerings
from swa_inductor.lowerings import (
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
from swa_inductor.lowerings._template import tag_compile_caches

tag_compile_caches()

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
