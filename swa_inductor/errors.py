"""The errors of the package and their one wording: the argument, what came, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class InvalidArgumentError(ValueError):
    """An argument is outside what the function allows. Nothing has been written."""


class UnsupportedError(NotImplementedError):
    """A valid request that this version or this device cannot serve. Nothing has been written."""


class OutOfSlotsError(RuntimeError):
    """Every state slot is in use or waits for a step that is in flight."""


def require_integer(name: str, value: object, least: int = 1) -> None:
    """Raise InvalidArgumentError unless `value` is an integer of at least `least`."""
    if not (isinstance(value, int) and value >= least):  # only then repr, which Dynamo does not trace where ints vary
        require(False, name, repr(value), f"an integer of at least {least}")


def require_each(name: str, values: Iterable[object], kind: type | tuple[type, ...], what: str) -> tuple[Any, ...]:
    """The values as a tuple; InvalidArgumentError unless they can be listed and each is of `kind`, told as `what`."""
    require(isinstance(values, Iterable), name, repr(values), f"a sequence, each {what}")
    result = tuple(values)
    for i, value in enumerate(result):
        require(isinstance(value, kind), f"{name}[{i}]", repr(value), what)
    return result


def require(condition: Any, name: str, got: object, allowed: str) -> None:
    """Raise InvalidArgumentError unless `condition` (a bool, or a SymBool over traced sizes) holds."""
    # bool() of a SymBool guards on it; sizes that cannot be decided at trace time become runtime assertions.
    if isinstance(condition, bool):
        if not condition:
            raise InvalidArgumentError(f"{name}: got {got}; allowed: {allowed}")
    else:
        from torch import _check_value

        _check_value(condition, lambda: f"{name}: got {got}; allowed: {allowed}")
