"""swa_inductor: sliding-window attention over ring caches for torch.compile.

Importing the package registers the ops (`torch.ops.swa_inductor.*`) and their Inductor lowerings.
"""

from typing import TYPE_CHECKING, Any

from swa_inductor import lowerings as _lowerings  # noqa: F401  registers the ops and their lowerings
from swa_inductor import sharding as _sharding  # noqa: F401  registers how the ops run on DTensors
from swa_inductor.api import (
    attention,
    attention_index,
    attention_prefill,
    attention_workspace,
    gather,
    merge_attention,
    ring_read_raw,
    ring_write_raw,
)
from swa_inductor.api_metadata import decode_index, prefill_index, prefill_plan, prepare_decode
from swa_inductor.api_store import norm_store, store, store_cast_back
from swa_inductor.errors import InvalidArgumentError, OutOfSlotsError, UnsupportedError
from swa_inductor.metadata import DecodeMetadata, PrefillMetadata, PreparedDecode
from swa_inductor.spec import RawRingSpec, RingSpec
from swa_inductor.state import Slot, SlotAllocator, StateLayout

if TYPE_CHECKING:
    from swa_inductor.explanation import explain

__version__ = "0.1.0"

__all__ = [
    "DecodeMetadata",
    "InvalidArgumentError",
    "OutOfSlotsError",
    "PrefillMetadata",
    "PreparedDecode",
    "RawRingSpec",
    "RingSpec",
    "Slot",
    "SlotAllocator",
    "StateLayout",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_index",
    "attention_prefill",
    "attention_workspace",
    "decode_index",
    "explain",
    "gather",
    "merge_attention",
    "norm_store",
    "prefill_index",
    "prefill_plan",
    "prepare_decode",
    "ring_read_raw",
    "ring_write_raw",
    "store",
    "store_cast_back",
]


def __getattr__(name: str) -> Any:
    if name != "explain":  # the only name that needs `testing`, which is no business of a model that is served
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swa_inductor.explanation import explain

    return explain
