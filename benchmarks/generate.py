"""`model.generate` with rings and stock, greedy, in one run: random models of four architectures, or Gemma 3 270M.

ms per token is the time of --new-tokens tokens less that of one, over their number less one, the fastest of three calls
after two that compile. Stock is a static cache, whose steps transformers compiles on a GPU, and the default cache.
Before anything is timed, rings must give stock's tokens in fp32.

    python -m benchmarks.generate [--models NAME ...] [--batches N ...] [--layers N] [--new-tokens N] [--check]

With --gemma the packaged weights and one prompt, with and without looked-up drafts (`prompt_lookup_num_tokens`).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor

from benchmarks import _measure
from swa_inductor import demo
from swa_inductor.integrations.transformers import use_rings
from swa_inductor.lowerings._inductor import cudagraph_recordings

LAYERS, PROMPT, CHECKED, DRAFTS = 8, 600, 24, 5
TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)
BASE = {"vocab_size": 32_000, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3TextConfig",
        {
            "layer_types": TYPES,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "layer_types": TYPES,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "layer_types": TYPES,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
            "n_routed_experts": 8,
            **EXPERTS,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            "layer_types": ["sliding_attention"] * LAYERS,
            "mlp_layer_types": ["moe"] * LAYERS,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "n_routed_experts": 8,
            **EXPERTS,
        },
    ),
}
"""Attention of the published models, fewer layers and experts."""
SMALL = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "sliding_window": 16}
"""What --check makes of them, beside fewer heads."""
STOCK = {"static": {"cache_implementation": "static"}, "dynamic": {}}


def build(name: str, layers: int, small: bool) -> Any:
    kind, fields = MODELS[name]
    fields = {**BASE, **fields, **({**SMALL, "num_attention_heads": 16} if small else {}), "num_hidden_layers": layers}
    for per_layer in ("layer_types", "mlp_layer_types"):
        if per_layer in fields:
            fields[per_layer] = fields[per_layer][:layers]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    with torch.device(_measure.DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return model.requires_grad_(False)


def generate(model: Any, ids: Tensor, count: int, **how: Any) -> Tensor:
    """The new tokens [B, count]."""
    out = model.generate(ids, do_sample=False, min_new_tokens=count, max_new_tokens=count, **how)
    return out[:, ids.shape[1] :]


def synchronize() -> None:
    if _measure.DEVICE == "cuda":
        torch.cuda.synchronize()


def ms_per_token(model: Any, ids: Tensor, count: int, **how: Any) -> float | None:
    """None where the model does not do it; a line on stderr then."""

    def seconds(tokens: int) -> float:
        synchronize()
        start = time.perf_counter()
        generate(model, ids, tokens, **how)
        synchronize()
        return time.perf_counter() - start

    try:
        if not _measure.TIMED:
            generate(model, ids, count, **how)
            return float("nan")
        for _ in range(2):
            seconds(count)
        return (min(seconds(count) for _ in range(3)) - min(seconds(1) for _ in range(3))) / (count - 1) * 1e3
    except Exception as error:
        print(f"{type(model).__name__} {how}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return None


def require_same(what: str, model: Any, ids: Tensor, count: int, **how: Any) -> None:
    """In fp32 rings give the tokens of the stock model."""
    torch._dynamo.reset()
    want = generate(model, ids, count)
    with use_rings(model):
        got = generate(model, ids, count, **how)
    if not torch.equal(got, want):
        raise SystemExit(f"{what}: other tokens than stock's, from number {int((got != want).nonzero()[0, 1])} on")


def measure(name: str, model: Any, ids: Tensor, count: int, **how: Any) -> dict[str, Any]:
    sizes = {"layers": model.config.num_hidden_layers, "sequences": len(ids), "new tokens": count}
    row: dict[str, Any] = {"model": name, **sizes, **how}
    torch._dynamo.reset()
    recorded = cudagraph_recordings()
    with use_rings(model):
        row["rings, ms"] = ms_per_token(model, ids, count, **how)
    row["graphs recorded"] = cudagraph_recordings() - recorded
    for kind, cache in STOCK.items():
        torch._dynamo.reset()
        row[f"{kind}, ms"] = ms_per_token(model, ids, count, **cache, **how)
    return row


def checked(name: str, exact: Any, ids: Tensor, count: int, **how: Any) -> dict[str, Any]:
    """The figures of `exact`, in fp32, in bf16."""
    # Copied while it is new: once it has generated, it holds its compiled call, which a copy would go on calling.
    half, exact = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact)
    require_same(name, exact, ids, min(count, CHECKED), **how)
    return measure(name, half, ids, count, **how)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    small, rows = args.check, []
    count = 8 if small else args.new_tokens
    if args.gemma:
        tokenizer, exact = demo.load(None, torch.float32, torch.device(_measure.DEVICE), Console(stderr=True))
        ids, _ = demo.build_prompts(tokenizer, exact, 1)
        for how in ({}, {"prompt_lookup_num_tokens": DRAFTS}):
            rows.append(checked("Gemma 3 270M", exact, ids, count, **how))
        return rows
    for name in args.models:
        exact = build(name, 2 if small else args.layers, small)
        for batch in args.batches or ((2,) if small else (1, 8)):
            ids = torch.randint(2, exact.config.vocab_size, (batch, 24 if small else PROMPT), device=_measure.DEVICE)
            rows.append(checked(name, exact, ids, count))
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--layers", type=int, default=LAYERS, help="%(default)s, and at most so many")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--gemma", action="store_true", help="the packaged weights; needs the extra 'demo'")


if __name__ == "__main__":
    _measure.report("generate", run, options, unit="ms per token")
