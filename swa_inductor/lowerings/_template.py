"""Template sources and the cache tag: what turns the files of templates/ into TritonTemplates."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import torch

_TAG_FILES = ("lowerings", "templates", "meta")


def source(op: str) -> str:
    """Source of an op's template: the shared macros, then the kernel."""
    folder = files("swa_inductor") / "templates"
    return (folder / "_macros.py.jinja").read_text() + (folder / f"{op}.py.jinja").read_text()


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tag_compile_caches() -> None:
    """Make compile caches miss when this package changes.

    Inductor's cache keys hold the names of ops, not lowerings or templates registered outside torch: without the tag an
    edited template in a new process hits the cache and gives the old kernel (seen 2026-11).
    """
    digest = hashlib.sha256()
    root = files("swa_inductor")
    parts = [p for name in _TAG_FILES for p in (root / name).iterdir()] + [root / "reference.py", root / "spec.py"]
    for part in sorted(parts, key=str):
        if part.name.endswith((".py", ".jinja")):
            digest.update(part.name.encode() + part.read_bytes())
    tag = f"swa_inductor:{digest.hexdigest()[:16]}"
    config = torch.compiler.config
    if tag not in config.cache_key_tag:  # appended, never overwritten: users and other packages have tags too
        config.cache_key_tag = f"{config.cache_key_tag}{';' if config.cache_key_tag else ''}{tag}"
