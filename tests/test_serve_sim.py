"""The command serve-sim: traces through the engine with a compiled step, verified against every request alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_demo import tiny_model
from typer.testing import CliRunner

from swa_inductor.cli import app
from swa_inductor.serving import SmallModel, engine, serve_sim

AZURE = Path(__file__).parents[2] / "shared" / "data" / "azure_llm_2023_conv.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

__all__ = ["tiny_model"]  # a fixture


def invoke(*arguments: object) -> tuple[int, str]:
    command = ["serve-sim", "--device", "cpu", *map(str, arguments)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def figure(output: str, name: str) -> str:
    """A figure of the table that is printed."""
    (line,) = [line for line in output.splitlines() if name in line]
    return line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[-2].strip()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: for tests of the options."""
    compiled = serve_sim.DecodeStep
    monkeypatch.setattr(serve_sim, "DecodeStep", lambda *a, **k: compiled(*a, **k, compile=False))


def test_sixty_requests_as_alone(tmp_path: Path) -> None:
    """D9: from 1 to 16 live sequences, two buckets, two compilations; every request with its count and its tokens."""
    report, picture = tmp_path / "figures.json", tmp_path / "timeline.png"
    code, output = invoke(
        "--requests", 60, "--max-length", 700, "--slots", 16, "--buckets", "4,16,64", "--chunk-tokens", 512,
        "--verify", "all", "--json", report, "--plot", picture,
    )  # fmt: skip
    assert code == 0, output
    drawn = serve_sim.sample_trace(60)
    rows = [row.clip(700) for row in drawn]
    figures = json.loads(report.read_text())
    assert figures["requests"] == figures["verified"] == 60 and figures["wrong"] == []
    assert figures["prompt_tokens"] == figures["prefill_tokens"] == sum(r.context for r in rows)
    assert figures["generated_tokens"] == sum(r.generated for r in rows)
    assert figures["compiled_buckets"] == 2 and figures["recordings"] == figures["replays"] == 0
    assert set(figures["launches"]) == {"4", "16"} and min(figures["launches"].values()) > 0
    assert sum(figures["launches"].values()) == figures["steps"]
    assert set(range(1, 17)) == set(figures["timeline"]["rows"]) - {0}
    assert figures["device_errors"] == figures["preemptions"] == 0
    assert figures["clipped"] == sum(row.total > 700 for row in drawn)
    assert figures["ring_bytes"] < figures["full_kv_bytes"] == max(figures["timeline"]["full_kv_bytes"])
    assert {"torch", "python"} <= figures["versions"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert figure(output, "verified") == "60, 60" and figure(output, "buckets compiled") == "2, 0"


@pytest.mark.skipif(not AZURE.exists(), reason="needs the trace")
@pytest.mark.skipif("SWA_FULL_TRACE" not in os.environ, reason="minutes of work: set SWA_FULL_TRACE=1")
def test_five_hundred_requests_as_alone(tmp_path: Path) -> None:
    """The first 500 requests of the public trace: exact counts, tokens as alone, no bucket compiled twice."""
    report = tmp_path / "figures.json"
    code, output = invoke(
        "--trace", AZURE, "--requests", 500, "--buckets", "16,64", "--chunk-tokens", 512, "--verify", "all",
        "--json", report,
    )  # fmt: skip
    assert code == 0, output
    figures = json.loads(report.read_text())
    assert figures["verified"] == 500 and figures["wrong"] == []
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (467684, 132536)
    assert figures["compiled_buckets"] == 2 == sum(count > 0 for count in figures["launches"].values())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sync", [False, True])
def test_every_option(sync: bool, tmp_path: Path) -> None:
    """Drafts, time slices, clipping, a trace file and arrival times, in both loops."""
    trace, report = tmp_path / "trace.csv", tmp_path / "figures.json"
    lines = [f"2023-11-16 18:15:{i:02},{30 + 7 * i},{10 + i}\n" for i in range(12)]
    trace.write_text(HEADER + "".join(lines))
    code, output = invoke(
        "--trace", trace, "--requests", 10, "--slots", 3, "--buckets", "1,4", "--drafts", 2, "--time-slice", 5,
        "--max-length", 80, "--chunk-tokens", 40, "--realtime", 1000, "--seed", 3, "--verify", 6, "--json", report,
        *["--sync"] * sync,
    )  # fmt: skip
    assert code == 0, output
    figures = json.loads(report.read_text())
    assert figures["requests"] == 10 and figures["verified"] == 6 and figures["options"]["sync"] == sync
    assert figures["generated_tokens"] == sum(10 + i for i in range(10))
    assert figures["clipped"] == sum(30 + 7 * i + 10 + i > 80 for i in range(10)) > 0
    assert max(figures["timeline"]["live"]) <= 3 and figures["preemptions"] > 0
    assert figures["prefill_tokens"] > figures["prompt_tokens"]
    assert figures["drafts"] >= figures["accepted_drafts"] and figures["tokens_per_sequence_step"] >= 1
    assert ("synchronous loop" in output) == sync
    assert "draft tokens accepted" in output


@pytest.mark.usefixtures("eager")
def test_a_transformers_model(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """A sliding and a full layer, random token ids as prompts; alone is stock transformers."""
    report = tmp_path / "figures.json"
    code, output = invoke(
        "--model", tiny_model, "--requests", 6, "--max-length", 120, "--slots", 4, "--buckets", 4, "--chunk-tokens", 64,
        "--verify", "all", "--json", report,
    )  # fmt: skip
    assert code == 0, output
    figures = json.loads(report.read_text())
    assert figures["verified"] == 6 and figures["wrong"] == [] and figures["clipped"] > 0


@pytest.mark.usefixtures("eager")
def test_other_tokens_than_alone_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = SmallModel.reference_logits
    monkeypatch.setattr(SmallModel, "reference_logits", lambda self, tokens: -reference(self, tokens))
    code, output = invoke("--requests", 2, "--max-length", 30, "--slots", 2, "--buckets", 2, "--verify", "all")
    assert code == 1
    assert "request 0: generated token 0 is " in output and "request 1: " in output
    assert figure(output, "verified") == "2, 0"


@pytest.mark.usefixtures("eager")
def test_a_missing_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the request is verified or not."""
    serve = engine.Engine.run

    def lose(self: engine.Engine, *arguments: Any, **options: Any) -> dict[int, list[int]]:
        serve(self, *arguments, **options)[1].pop()
        return self.finished

    monkeypatch.setattr(engine.Engine, "run", lose)
    code, output = invoke("--requests", 2, "--max-length", 30, "--slots", 2, "--buckets", 2)
    assert code == 1
    assert " tokens generated, " in output and "request 1: " in output and "request 0" not in output


def test_first_difference() -> None:
    asked = serve_sim.Request(4, [1, 2], 3)
    assert serve_sim.first_difference(lambda tokens, count: [7, 8, 9], asked, [7, 8, 9]) is None
    assert serve_sim.first_difference(lambda tokens, count: [7, 8, 9], asked, [7, 6, 9]) == (
        "request 4: generated token 1 is 6, alone 8"
    )


def test_prompts_depend_on_seed_and_number_only() -> None:
    rows = serve_sim.sample_trace(4)
    requests = serve_sim.build_requests(rows, 50, 0)
    assert requests == serve_sim.build_requests(rows, 50, 0) and requests[:2] == serve_sim.build_requests(
        rows[:2], 50, 0
    )
    assert requests[0].prompt != serve_sim.build_requests(rows, 50, 1)[0].prompt
    assert [len(r.prompt) for r in requests] == [r.context for r in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "absent.csv"], "absent.csv: cannot be read as CSV"),
        (["--buckets", "4,x"], "--buckets: got '4,x'; allowed: integers of at least 1 with commas between them"),
        (["--buckets", "0"], "--buckets: got '0'"),
        (["--buckets", "4"], "--slots: got 64; allowed: 1 to 4, the largest bucket"),
        (["--verify", "most"], "--verify: got 'most'; allowed: a number, or all"),
        (
            ["--plot", "timeline.txt"],
            "--plot: got timeline.txt; allowed: a file name that ends in .png or .svg or .pdf",
        ),
        (["--device", "nonsense"], "--device nonsense"),
        (["--model", "absent/model", "--device", "cuda:99"], "--device c"),
    ],
)
def test_refusals_before_any_work(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Engine, "run", lambda *a, **k: pytest.fail("ran"))
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize("arguments", [("--slots", 0), ("--drafts", -1), ("--realtime", 0), ("--max-length", 1)])
def test_bad_numbers(arguments: tuple[object, ...]) -> None:
    assert invoke(*arguments)[0] == 2


def test_missing_matplotlib_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = invoke("--plot", "timeline.png")
    assert code == 2
    assert "pip install 'swa-inductor[cli]'" in output
