"""Contracts: schema, fake and eager implementation of each op. One file per op; torch only.

Importing this package registers the ops under `torch.ops.swa_inductor`. The same order in every file: SCHEMA, the fake,
the eager implementation, `define`.
"""

from swa_inductor.meta import attention, store

__all__ = ["attention", "store"]
