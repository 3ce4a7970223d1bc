"""swa_inductor::store: norm, rotate and cast the new K and V vectors and write them into the rings, in place."""

from __future__ import annotations

from typing import Any

from swa_inductor.meta import _store
from swa_inductor.meta._library import define

SCHEMA = f"store({_store.ARGUMENTS}{_store.OPTIONS}) -> ()"


def fake(*args: Any, **options: Any) -> None:
    _store.Write(*args, **options).check()


def eager(*args: Any, **options: Any) -> None:
    _store.Write(*args, **options)()


define(SCHEMA, fake=fake, eager=eager)
