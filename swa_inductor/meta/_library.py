"""The library handle of the `swa_inductor` namespace and the one way to register an op in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "swa_inductor"
OPS: dict[str, Callable[..., Any]] = {}
"""Eager implementations of the registered ops, in order of registration; an overload is `op.overload`."""

_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, *, fake: Callable[..., object], eager: Callable[..., Any]) -> None:
    """Register an op: written schema (a call costs 5 us, `custom_op` 18 us), fake and eager implementation."""
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    OPS[name] = eager
