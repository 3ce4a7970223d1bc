"""The command explain: the rings of a model from its config, which are those that a cache allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ring_models import MIXED, WINDOW, make_cache, make_config, make_model
from typer.testing import CliRunner

from swa_inductor import model_report
from swa_inductor.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)], env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def explain(tmp_path: Path, name: str, *options: object, **fields: object) -> tuple[int, str, dict]:
    """Exit code, output and figures for a model of which there is nothing but its config."""
    make_config(name, **fields).save_pretrained(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    if "--kernels" not in options:
        options += ("--no-kernels",)
    code, output = invoke(tmp_path / "model", *options, "--json", tmp_path / "figures.json")
    return code, output, json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.parametrize("name", ["gemma3", "mistral", "mimo_v2_flash", "gemma4", "phi3"])
def test_the_rings_are_those_of_a_cache(name: str, tmp_path: Path) -> None:
    kv_format = "fp16" if name in ("phi3", "mimo_v2_flash") else "mxfp8"  # whose vectors are no blocks of 32
    options = "--max-length", 50, "--tokens-per-step", 2, "--kv-format", kv_format
    code, output, figures = explain(tmp_path, name, *options)
    assert code == 0, output
    assert figures["kernels"] is None and "decode step" not in output
    model = make_model(name)
    cache = make_cache(model, batch_size=1, max_length=50, tokens_per_step=2, kv_format=figures["kv_format"])
    assert len(figures["layers"]) == len(cache.layers)
    for figure, layer in zip(figures["layers"], cache.layers, strict=True):
        spec = layer.spec
        assert figure["type"] == ("sliding" if layer.is_sliding else "full") and figure["reason"] == ""
        for field in ("window", "num_kv_heads", "head_dim", "v_head_dim", "rows", "record_bytes"):
            assert figure[field] == getattr(spec, field), field
        assert figure["ring_bytes"] == layer.ring.numel()
        assert figure["full_bytes"] == 50 * spec.num_kv_heads * spec.record_bytes
        assert f"{layer.ring.numel():,}" in output
    assert figures["slot_bytes"] >= cache.cache_bytes > figures["slot_bytes"] - 32 * len(cache.layers)
    assert figures["full_bytes"] == sum(figure["full_bytes"] for figure in figures["layers"])
    assert f"{figures['slot_bytes']:,}" in output and f"{figures['full_bytes']:,}" in output


def test_what_the_config_says_is_the_default(tmp_path: Path) -> None:
    code, _, figures = explain(tmp_path, "gemma3", max_position_embeddings=4096, dtype="bfloat16")
    assert code == 0 and figures["max_length"] == 4096 and figures["kv_format"] == "bf16"
    sliding, full = figures["layers"][:2]
    assert [layer["type"] for layer in figures["layers"]] == [t.removesuffix("_attention") for t in MIXED]
    assert (sliding["window"], sliding["rows"]) == (WINDOW, WINDOW + 1)
    assert (full["window"], full["rows"]) == (4096, 4097)
    assert sliding["record_bytes"] == 2 * 2 * 32 and sliding["ring_bytes"] == (WINDOW + 1) * 2 * 128


@pytest.mark.parametrize(("name", "index"), [("gpt_oss", 0), ("gemma4", 1)])
def test_kernels_of_the_first_sliding_layer(name: str, index: int, tmp_path: Path) -> None:
    """One store, one attention, and the projections around them; all of it in one graph."""
    code, output, figures = explain(tmp_path, name, "--max-length", 50, "--kernels", dtype="bfloat16")
    assert code == 0 and figures["no_kernels"] == "", output
    ops = [kernel["op"] for kernel in figures["kernels"]["kernels"]]
    store, attend = ops.index("swa_inductor.store"), ops.index("swa_inductor.attention")
    assert store < attend and [str(op).startswith("swa_inductor.") for op in ops].count(True) == 2
    gemms = [op in ("aten.mm", "aten.addmm") for op in ops]
    assert gemms[:attend].count(True) == 3 and gemms[attend:].count(True) >= 1
    assert f"in layer {index}, as compiled" in output and "swa_inductor.attention" in output


def test_kernels_that_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a C++ compiler is needed\nmore")

    monkeypatch.setattr(model_report, "layer_kernels", fail)
    code, output, figures = explain(tmp_path, "gemma3", "--max-length", 50, "--kernels")
    assert code == 0 and figures["kernels"] is None
    assert figures["no_kernels"] == "RuntimeError: a C++ compiler is needed" and figures["no_kernels"] in output


def test_a_layer_that_is_refused(tmp_path: Path) -> None:
    types = ["sliding_attention", "heavily_compressed_attention", "sliding_attention"]
    code, output, figures = explain(tmp_path, "deepseek_v4", "--max-length", 50, layer_types=types)
    assert code == 1
    assert [layer["type"] for layer in figures["layers"]] == ["sliding", "refused", "sliding"]
    assert figures["layers"][0]["v_head_dim"] is None and "K is V" in output
    reason = figures["layers"][1]["reason"]
    assert figures["refused"] == [reason] and reason in output
    assert "layer 1 is 'heavily_compressed_attention'" in reason
    assert figures["full_bytes"] == 2 * figures["layers"][2]["full_bytes"] > 0


def test_a_head_dim_that_a_format_does_not_hold(tmp_path: Path) -> None:
    code, output, figures = explain(tmp_path, "phi3", "--max-length", 50, "--kv-format", "mxfp8")
    assert code == 1 and {layer["type"] for layer in figures["layers"]} == {"refused"}
    assert "head_dim: got 8" in output and figures["slot_bytes"] == 0


def test_a_model_that_is_refused_as_a_whole(tmp_path: Path) -> None:
    code, output, figures = explain(tmp_path, "gemma3", "--max-length", 50, use_bidirectional_attention=True)
    assert code == 1 and figures["layers"] == [] and "bidirectional attention" in output


@pytest.mark.parametrize("change", [{"model_type": "no_such_model"}, {"sliding_window": "wide"}])
def test_what_is_no_model(change: dict, tmp_path: Path) -> None:
    code, output = invoke(tmp_path)
    assert code == 2 and f"makes no model of {tmp_path}" in output
    make_config().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    code, output = invoke(tmp_path)
    assert code == 2 and f"makes no model of {tmp_path}" in output


def test_a_length_that_nobody_gives(tmp_path: Path) -> None:
    from transformers import BloomConfig

    BloomConfig().save_pretrained(tmp_path)
    code, output = invoke(tmp_path)
    assert code == 2 and "give --max-length" in output
