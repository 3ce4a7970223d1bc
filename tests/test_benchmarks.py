"""What benchmarks compare computes the same: --check runs all contenders on the CPU, against fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swa_inductor.meta._library import OPS

ROOT = Path(__file__).parent.parent


def check(name: str, *options: str) -> list[str]:
    """Lines of the table that a benchmark prints; it fails where a result is wrong."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--check", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # small tensors
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("shape", ["v4-64", "gpt-oss"])
def test_all_contenders_of_decode_compute_the_same(shape: str) -> None:
    head, row = check("decode", "--shapes", shape)
    for name in ("swa_inductor", "SDPA", "FlexAttention", "bmm", "ring"):
        assert name in head
    assert row


@pytest.mark.parametrize("options", [("--shapes", "V4-Flash"), ("--stack", "2")], ids=["parts", "stack"])
def test_the_parts_of_a_layer_are_what_the_layer_does(options: tuple[str, ...]) -> None:
    head, row = check("layer", *options)
    assert "GEMMs" in head and row


def test_generate_with_rings_gives_the_tokens_of_stock() -> None:
    pytest.importorskip("transformers", minversion="5.17")
    head, row = check("generate", "--models", "gpt_oss")
    assert "rings" in head and "gpt_oss" in row


def test_a_layer_on_two_ranks_computes_the_same() -> None:
    head, row = check("parallel", "--shapes", "V4-Flash")
    assert "2 ranks" in head and row


def test_the_soak_loop_is_what_lists_say() -> None:
    """F1, F4, F14: 150 steps with rejected drafts, slots that change hands, and a bad sequence in every step."""
    head, row = check("soak")
    assert "largest error of a count" in head and row.split()[:1] == ["150"]
    ended, refused = row.split()[2:4]
    assert int(ended) > 10 and int(refused) == 150


def test_the_sanitizers_see_every_op() -> None:
    *geometries, ops = check("sanitize", "2", "3")
    assert [line.split(":")[0] for line in geometries] == ["bf16", "fp32"]
    assert set(ops.split()) == set(OPS)
