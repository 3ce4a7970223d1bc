"""Compile caches notice an edited rule: two processes, one cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import swa_inductor
from swa_inductor.lowerings._template import tag_compile_caches

PROGRAM = """
import torch, swa_inductor as swa
from torch._dynamo.utils import counters
spec = swa.RingSpec(4, 1, 64, kv_format="fp32")
cache = torch.zeros(spec.cache_shape(1), dtype=torch.uint8)
slot, at = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
k = torch.full((1, 1, 64), 1.5)
for _ in range(2):
    cache.zero_()
    torch._dynamo.reset()
    torch.compile(lambda *a: swa.store(*a, spec=spec), fullgraph=True)(k, k, cache, slot, at)
    print(cache[0, :, 0].float().sum(1).tolist(), counters["inductor"]["fxgraph_cache_hit"])
"""


def run(package_parent: Path, cache: Path) -> list[tuple[str, int]]:
    """The rows written, and how often the cache has hit so far, of two compilations."""
    env = dict(os.environ, PYTHONPATH=str(package_parent), TORCHINDUCTOR_CACHE_DIR=str(cache))
    # `python -c` looks in the current directory first: it must not hold the package
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=env, cwd=package_parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.strip().splitlines()]
    return [(rows, int(hits)) for rows, hits in lines]


def test_an_edited_rule_misses_the_cache(tmp_path: Path) -> None:
    """C7: the same op by name, its meaning changed by an offset of one row."""
    shutil.copytree(Path(swa_inductor.__file__).parent, tmp_path / "copy" / "swa_inductor")
    (first, missed), (again, hits) = run(tmp_path / "copy", tmp_path / "cache")
    assert again == first and (missed, hits) == (0, 1)
    rule = tmp_path / "copy" / "swa_inductor" / "reference.py"
    text = rule.read_text()
    assert "positions[source] % cache.shape[1]" in text
    rule.write_text(text.replace("positions[source] % cache.shape[1]", "(positions[source] + 1) % cache.shape[1]"))
    (edited, missed), (again, hits) = run(tmp_path / "copy", tmp_path / "cache")
    assert edited == again != first and (missed, hits) == (0, 1)


def test_the_tag_is_appended_and_only_once() -> None:
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        assert "swa_inductor:" in before
        tag_compile_caches()
        assert config.cache_key_tag == before
        config.cache_key_tag = "mine"
        tag_compile_caches()
        assert config.cache_key_tag.startswith("mine;swa_inductor:")
    finally:
        config.cache_key_tag = before
