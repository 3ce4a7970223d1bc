"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_layer_compiles_and_runs() -> None:
    (layer,) = [b for b in BLOCKS if "class Attention" in b]
    assert len([line for line in layer.splitlines() if "swa." in line]) >= 3
    exec(compile(layer, "README.md", "exec"), {"__name__": "readme"})


def test_the_transformers_lines_run() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=8,
        max_position_embeddings=4096,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    (one_line,) = [b for b in BLOCKS if "use_rings" in b]
    (own_forward,) = [b for b in BLOCKS if "RingCache" in b]
    scope = {"model": model, "input_ids": torch.randint(0, 64, (1, 12))}
    exec(compile(one_line.replace("max_new_tokens=64", "max_new_tokens=3"), "README.md", "exec"), scope)
    assert model.config._attn_implementation != "swa_ring"
    with torch.no_grad():
        exec(compile(own_forward, "README.md", "exec"), scope)
    assert scope["cache"].cache_bytes > 0 and scope["logits"].shape == (1, 12, 64)


def test_the_deepseek_lines_run() -> None:
    (lines,) = [b for b in BLOCKS if "deepseek_v4" in b]
    scope: dict = {"__name__": "readme"}
    exec(compile(lines, "README.md", "exec"), scope)
    assert scope["out"].isfinite().all() and scope["layer"].cache.any()


def test_the_explanation_is_the_printed_one(capsys: pytest.CaptureFixture) -> None:
    ((lines, printed),) = re.findall(r"```python\n([^`]*swa\.explain\([^`]*)```\n\n```\n(.*?)```", README, re.S)
    exec(compile(lines, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == printed
