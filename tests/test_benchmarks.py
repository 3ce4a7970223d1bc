"""What benchmarks compare computes the same: --check runs all contenders on the CPU, against fp64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(name: str, *options: str) -> list[str]:
    """Lines of the table that a benchmark prints; it fails where a result is wrong."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--check", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
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
