"""Template sources and the cache tag: what turns the files of templates/ into TritonTemplates."""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import torch

from swa_inductor.spec import MXFP8_BLOCK

GLUON_TRITONS = ("3.6",)
"""Versions of Triton whose Gluon kernels have passed their tests on a card: it promises no stable interface."""


def gluon_wanted(asked: str | None) -> bool:
    """Whether lowerings may choose kernels in Gluon; `asked`: SWA_INDUCTOR_GLUON, 0 or 1, of the environment."""
    if asked is not None:
        return asked != "0"
    try:
        return version("triton").rsplit(".", 1)[0] in GLUON_TRITONS
    except PackageNotFoundError:
        return False


GLUON = gluon_wanted(os.environ.get("SWA_INDUCTOR_GLUON"))

STORED_TYPES = {"mxfp8": "tl.uint8", "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}
"""Triton type of a stored value, by record format."""


def source(op: str) -> str:
    """Source of an op's template: the shared macros (they print nothing until called), then the kernel."""
    folder = files("swa_inductor") / "templates"
    return "".join(
        (folder / f"{part}.py.jinja").read_text() for part in ("_records", "_attend", "_store", "_resident", op)
    )


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def vector_block(dim: int) -> int:
    """Tile width of a vector of `dim` values: a power of two that holds whole mxfp8 blocks."""
    return max(MXFP8_BLOCK, next_power_of_2(dim))


def tag_compile_caches() -> None:
    """Make compile caches miss when this package changes.

    Inductor's cache keys hold the names of ops, not lowerings or templates registered outside torch: without the tag an
    edited template in a new process hits the cache and gives the old kernel (seen 2026-11).
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for part in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".jinja")):
        digest.update(str(part.relative_to(root)).encode() + part.read_bytes())
    tag = f"swa_inductor:{digest.hexdigest()[:16]}{':gluon' if GLUON else ''}"
    config = torch.compiler.config
    if tag not in config.cache_key_tag:  # appended, never overwritten: users and other packages have tags too
        config.cache_key_tag = f"{config.cache_key_tag}{';' if config.cache_key_tag else ''}{tag}"
