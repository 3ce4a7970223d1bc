"""The command line and its demo: on a tiny random model, and on the packaged weights where they are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import swa_inductor
from swa_inductor import demo
from swa_inductor.cli import app

WINDOW = 16


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a two-layer random Gemma 3 (one sliding layer, one full) and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=512,
    )
    Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["demo", *map(str, arguments)], env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_compiled_beside_compiled_stock(tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    code, output = invoke("--model", tiny_model, "--device", "cpu", "--new-tokens", 4, "--batch", 3, "--json", report)
    assert code == 0, output
    assert "Nothing is downloaded" in output
    assert "Greedy tokens identical to stock transformers." in output
    figures = json.loads(report.read_text())
    assert figures["passed"] and figures["agreement"]["identical"]
    assert figures["agreement"]["max_logit_diff"] < 1e-3
    assert figures["prompt_tokens"][0] > WINDOW + 1 and len(set(figures["prompt_tokens"])) == 3
    assert figures["ours"]["compiles"] == 1
    assert figures["ours"]["tokens"] == figures["stock"]["tokens"]
    assert len(figures["ours"]["tokens"][0]) == 4
    assert 0 < figures["ours"]["cache_bytes"]
    assert {"torch", "transformers", "python"} <= figures["versions"].keys()


def test_batch_of_different_lengths_in_another_kv_format(tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    code, output = invoke(
        "--model", tiny_model, "--device", "cpu", "--new-tokens", 4, "--batch", 3, "--kv-format", "mxfp8",
        "--stock", "eager", "--json", report,
    )  # fmt: skip
    assert code == 0, output
    assert "Rings in mxfp8, model in fp32" in output
    figures = json.loads(report.read_text())
    assert len(set(figures["prompt_tokens"])) == 3
    assert figures["ours"]["compiles"] == 1 and figures["stock"]["compiles"] == 0
    assert 0 < figures["agreement"]["kl"] < 0.1
    assert figures["agreement"]["max_logit_diff"] > 0


def test_different_tokens_fail(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swa_inductor.integrations.transformers import RingCache

    prefill = demo.Decoder.prefill

    def wrong_for_ours(self: demo.Decoder) -> tuple[torch.Tensor, torch.Tensor]:
        token, logits = prefill(self)
        return (token + 1) % 200 if isinstance(self.cache, RingCache) else token, logits

    monkeypatch.setattr(demo.Decoder, "prefill", wrong_for_ours)
    code, output = invoke("--model", tiny_model, "--device", "cpu", "--new-tokens", 2, "--stock", "eager")
    assert code == 1, output
    assert "Greedy tokens differ from stock transformers" in output


@pytest.mark.parametrize(
    ("dtype", "kv_format", "identical", "clear_misses", "passes"),
    [
        ("fp32", "fp32", True, 0, True),
        ("fp32", "fp32", False, 0, False),
        ("fp32", "mxfp8", False, 3, True),
        ("bf16", "bf16", False, 0, True),
        ("bf16", "bf16", False, 1, False),
    ],
)
def test_verdict(dtype: str, kv_format: str, identical: bool, clear_misses: int, passes: bool) -> None:
    agreement = demo.Agreement(identical, 0.5, 0.1, 0.01, clear_misses)
    assert agreement.judge(dtype, kv_format)[0] is passes


def test_missing_compiler_is_said_before_any_work(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(demo, "load", lambda *arguments: pytest.fail("loaded a model"))
    code, output = invoke("--model", tiny_model, "--device", "cpu")
    assert code == 2
    assert "apt install g++" in output


def test_missing_extra_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == demo.PACKAGED_MODEL else find_spec(name)
    )
    code, output = invoke()
    assert code == 2
    assert "Gemma Terms of Use" in output
    assert "pip install 'swa-inductor[demo]'" in output


@pytest.mark.parametrize("arguments", [("--device", "nonsense"), ("--batch", 0), ("--kv-format", "int4")])
def test_bad_arguments(arguments: tuple[object, ...], tiny_model: Path) -> None:
    assert invoke("--model", tiny_model, *arguments)[0] == 2


def test_path_without_a_model(tmp_path: Path) -> None:
    code, output = invoke("--model", tmp_path, "--device", "cpu")
    assert code == 2
    assert "cannot load" in output


def test_module_entry_point() -> None:
    shown = subprocess.run([sys.executable, "-m", "swa_inductor", "--version"], capture_output=True, text=True)
    assert shown.stdout.strip() == swa_inductor.__version__


@pytest.mark.skipif(importlib.util.find_spec(demo.PACKAGED_MODEL) is None, reason="needs the extra 'demo'")
def test_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo, then `generate` of the same model with drafts: loading it takes most of the time."""
    load, loaded = demo.load, []
    monkeypatch.setattr(demo, "load", lambda *arguments: loaded.append(load(*arguments)) or loaded[-1])
    report = tmp_path / "figures.json"
    code, output = invoke("--device", "cpu", "--new-tokens", 16, "--stock", "eager", "--json", report)
    assert code == 0, output
    figures = json.loads(report.read_text())
    assert figures["agreement"]["identical"]
    assert figures["ours"]["compiles"] == 1
    assert figures["prompt_tokens"][0] > 600

    from swa_inductor.integrations.transformers import use_rings, use_stock

    ((tokenizer, model),) = loaded
    use_stock(model)
    ids, _ = demo.build_prompts(tokenizer, model, 1)
    steps: list[int] = []
    model.register_forward_hook(lambda *arguments: steps.append(1))
    use_rings(model)
    out = model.generate(ids, do_sample=False, max_new_tokens=16, prompt_lookup_num_tokens=5)
    got, want = out[0, ids.shape[1] :].tolist(), figures["stock"]["tokens"][0]
    assert tokenizer.decode(got) == tokenizer.decode(want) and got == want
    assert len(steps) < 16  # drafts were accepted
