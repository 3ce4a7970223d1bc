"""The demo with drafts: tokens of plain decoding, whatever is drafted, and a failure where they are others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_demo import WINDOW, invoke, tiny_model

from swa_inductor import demo_drafts
from swa_inductor.demo import NEAR_TIE
from swa_inductor.serving import decode_step

__all__ = ["tiny_model"]  # a fixture


def arguments(tiny_model: Path, report: Path) -> list[object]:  # noqa: F811
    return ["--model", tiny_model, "--device", "cpu", "--new-tokens", 24, "--stock", "none", "--json", report]


def test_drafts_beside_plain_decoding(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Two prompts of different lengths, longer than the window; compiled, one bucket on each side."""
    report = tmp_path / "figures.json"
    code, output = invoke(*arguments(tiny_model, report), "--batch", 2, "--drafts", 5)
    assert code == 0, output
    assert "Not compared with stock" in output
    assert "5 drafts per step: tokens identical to plain decoding." in output
    figures = json.loads(report.read_text())
    assert len(set(figures["prompt_tokens"])) == 2 and min(figures["prompt_tokens"]) > WINDOW
    drafts = figures["drafts"]
    plain, drafted = drafts["plain"], drafts["drafted"]
    assert drafts["passed"] and drafts["identical"] and drafts["differing"] == drafts["clear_misses"] == 0
    assert plain["tokens"] == drafted["tokens"] == figures["ours"]["tokens"]
    assert [len(tokens) for tokens in plain["tokens"]] == [24, 24]
    assert (plain["steps"], plain["tokens_per_step"], plain["tried_drafts"]) == (23, 1, 0)
    assert drafted["steps"] < 23 and 1 < drafted["tokens_per_step"] <= 6
    assert 0 < drafted["accepted_drafts"] <= drafted["tried_drafts"]
    assert drafts["acceptance_rate"] == drafted["accepted_drafts"] / drafted["tried_drafts"]
    assert drafts["speed_up"] == plain["ms_per_token"] / drafted["ms_per_token"] > 0
    for side in (plain, drafted):
        assert (side["compiled_buckets"], side["recordings"]) == (1, 0)
    rows = {name.strip(): value.strip() for name, value, _ in table_rows(output)}
    assert rows["5 drafts: tokens identical to plain"] == "yes"
    assert rows["drafts accepted"] == f"{drafts['acceptance_rate']:.1%} of {drafted['tried_drafts']}"
    assert rows["tokens per sequence and step"] == f"{drafted['tokens_per_step']:.2f}"
    assert rows["ms/token, plain / with drafts"] == f"{plain['ms_per_token']:.2f} / {drafted['ms_per_token']:.2f}"
    assert rows["speed-up by drafts"] == f"{drafts['speed_up']:.2f}"
    assert rows["buckets compiled, plain / with drafts"] == "1 / 1"
    assert rows["CUDA graphs recorded, plain / with drafts"] == "0 / 0"


def table_rows(output: str) -> list[list[str]]:
    return [line.strip("│").split("│") for line in output.splitlines() if line.startswith("│")]


@pytest.mark.gpu
def test_graphs(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """One CUDA graph on each side."""
    report = tmp_path / "figures.json"
    code, output = invoke(*arguments(tiny_model, report), "--device", "cuda", "--dtype", "fp32", "--drafts", 5)
    assert code == 0, output
    drafts = json.loads(report.read_text())["drafts"]
    assert drafts["identical"] and drafts["drafted"]["accepted_drafts"] > 0
    for side in (drafts["plain"], drafts["drafted"]):
        assert (side["compiled_buckets"], side["recordings"]) == (1, 1)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)


@pytest.mark.usefixtures("uncompiled")
def test_other_tokens_fail(
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D8: a step that keeps what follows a wrong draft."""

    def trusting(tokens, sampled, counts, room, eos_token_id):  # noqa: ANN001, ANN202
        return torch.minimum(counts + 1, room).clamp(min=0).to(torch.int32)

    monkeypatch.setattr(decode_step, "verify", trusting)
    report = tmp_path / "figures.json"
    code, output = invoke(*arguments(tiny_model, report), "--drafts", 3)
    assert code == 1, output
    assert "3 drafts per step: tokens of 1 sequences differ from plain decoding." in output
    figures = json.loads(report.read_text())
    assert not figures["passed"] and not figures["drafts"]["identical"] and figures["drafts"]["clear_misses"] == 1
    assert "no" in next(value for name, value, _ in table_rows(output) if "3 drafts: tokens identical" in name)


def test_more_drafts_than_allowed(tiny_model: Path) -> None:  # noqa: F811
    assert invoke("--model", tiny_model, "--drafts", 8)[0] == 2


@pytest.mark.parametrize(
    ("differing", "clear_misses", "dtype", "kv_format", "passes"),
    [
        (0, 0, "fp32", "fp32", True),
        (1, 0, "fp32", "fp32", False),
        (2, 1, "fp32", "mxfp8", True),
        (2, 0, "bf16", "bf16", True),
        (2, 1, "bf16", "bf16", False),
    ],
)
def test_verdict(differing: int, clear_misses: int, dtype: str, kv_format: str, passes: bool) -> None:
    assert demo_drafts.judge(5, differing, clear_misses, dtype, kv_format)[0] is passes


def test_clear_misses() -> None:
    """What counts is how far the two tokens are below stock's best, at the first place where they differ."""
    tie = 16 * NEAR_TIE * torch.finfo(torch.bfloat16).eps
    seen = []

    class Stock:
        device, dtype = torch.device("cpu"), torch.bfloat16

        def __call__(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
            seen.append(input_ids.tolist())
            logits = [16, 16 - 0.5 * tie, 16 - 2 * tie, 16 - 2 * tie]
            return SimpleNamespace(logits=torch.tensor([[logits]], dtype=torch.bfloat16))

    prompt = [7, 8]
    assert not demo_drafts.is_clear_miss(Stock(), prompt, [0, 1, 2], [0, 1, 2]) and not seen
    assert not demo_drafts.is_clear_miss(Stock(), prompt, [5, 0, 2], [5, 1, 3])
    assert seen == [[[7, 8, 5]]]
    assert demo_drafts.is_clear_miss(Stock(), prompt, [0], [2])
    assert demo_drafts.is_clear_miss(Stock(), prompt, [2], [3])
