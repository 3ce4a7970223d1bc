"""What the lowerings tell the macros of templates/_records.py.jinja about the records of a cache."""

from __future__ import annotations

from typing import Any

import torch

from swa_inductor.lowerings import _inductor


def constants(cache: Any) -> dict[str, Any]:
    """Constants of a kernel that reads records of `cache` [num_slots, R, H_kv, record].

    HARDWARE_E4M3: the card converts e4m3, exactly as the integer form does but in a quarter of the instructions.
    WORDS: every record starts at a multiple of 4 bytes.
    """
    card = torch.cuda.get_device_properties(cache.get_device())
    steps = [*_inductor.known_strides(cache)[:-1], _inductor.known_int(cache.get_size()[-1])]
    return {
        "HARDWARE_E4M3": (card.major, card.minor) >= (8, 9),
        "WORDS": all(x is not None and x % 4 == 0 for x in steps),
    }
