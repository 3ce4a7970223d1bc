"""The errors of the package and their one wording: the argument, what came, what is allowed."""

from __future__ import annotations

from typing import Any


class InvalidArgumentError(ValueError):
    """An argument is outside what the function allows. Nothing has been written."""


class UnsupportedError(NotImplementedError):
    """A valid request that this version or this device cannot serve. Nothing has been written."""


class OutOfSlotsError(RuntimeError):
    """Every state slot is in use or waits for a step that is in flight."""


def require(condition: Any, name: str, got: object, allowed: str) -> None:
    """Raise InvalidArgumentError unless `condition` (a bool, or a SymBool over traced sizes) holds."""
    # bool() of a SymBool guards on it; sizes that cannot be decided at trace time become runtime assertions.
    if isinstance(condition, bool):
        if not condition:
            raise InvalidArgumentError(f"{name}: got {got}; allowed: {allowed}")
    else:
        from torch import _check_value

        _check_value(condition, lambda: f"{name}: got {got}; allowed: {allowed}")
