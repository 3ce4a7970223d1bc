"""Ring caches for transformers (5.17 and later).

`use_rings` lets `model.generate` keep its keys and values in rings, until it is switched back. `RingCache` is the cache
for forwards of your own: `RingCache.from_model` allocates the rings and switches the model to the attention
implementation "swa_ring" (see _layers.py). No Python number changes from step to step, so a compiled decode step
compiles once and is one CUDA graph.

`TransformersSlotModel` makes a model one that an engine can serve, with the rings of any number of sequences.
`parallelize` splits the heads of a model over the ranks of a mesh.
"""

from __future__ import annotations

from swa_inductor.integrations._cache import RingCache
from swa_inductor.integrations._generate import Rings, use_rings
from swa_inductor.integrations._layers import NewKV, RingLayer, cache_kwarg, ring_attention, use_stock
from swa_inductor.integrations._mask import IMPLEMENTATION
from swa_inductor.integrations._parallel import parallelize
from swa_inductor.integrations._slots import SlotCache, TransformersSlotModel

__all__ = [
    "IMPLEMENTATION",
    "NewKV",
    "RingCache",
    "RingLayer",
    "Rings",
    "SlotCache",
    "TransformersSlotModel",
    "cache_kwarg",
    "parallelize",
    "ring_attention",
    "use_rings",
    "use_stock",
]
