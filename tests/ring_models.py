"""Tiny random transformers models, a RingCache for them, and what stock attention says: shared by its tests."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteSWAConfig,
    MiMoV2FlashConfig,
    MinistralConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
)
from transformers.models.auto import AutoModelForCausalLM

from swa_inductor.integrations.transformers import RingCache, cache_kwarg

WINDOW, VOCAB = 16, 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": WINDOW,
    # Large weights: with the usual ones the output hardly depends on attention, and no test could fail.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "gemma3": lambda: Gemma3TextConfig(**SMALL, layer_types=MIXED, query_pre_attn_scalar=64),
    "gemma2": lambda: Gemma2Config(
        **SMALL, layer_types=MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=30.0
    ),
    "gpt_oss": lambda: GptOssConfig(**SMALL, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=1),
    "mistral": lambda: MistralConfig(**SMALL),
    "olmo3": lambda: Olmo3Config(**SMALL, layer_types=MIXED),
    "cohere2": lambda: Cohere2Config(**SMALL, layer_types=MIXED),
    "ministral": lambda: MinistralConfig(**SMALL, layer_types=MIXED),
    "exaone4": lambda: Exaone4Config(**SMALL, layer_types=MIXED),
    "granite_swa": lambda: GraniteSWAConfig(**SMALL, layer_types=MIXED),
    "phi3": lambda: Phi3Config(**{**SMALL, "head_dim": 8}),  # one projection for q, k and v
    # More KV heads in sliding layers than the config says, and values shorter than keys.
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **SMALL, layer_types=MIXED, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    # Full layers with a geometry of their own, in which keys and values have one projection.
    "gemma4": lambda: Gemma4TextConfig(
        **SMALL,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
        use_bidirectional_attention="vision",  # not that of text
    ),
}


@pytest.fixture(autouse=True)
def small_runs():
    """Tiny tensors: threads only get in each other's way. Compiled code of another test would count as a recompile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def make_model(name: str = "gemma3", dtype: torch.dtype = torch.float32, layers: int = 3) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    if layers < config.num_hidden_layers:
        config.num_hidden_layers = layers
        if name not in ("mistral", "phi3"):
            config.layer_types = config.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.requires_grad_(False)


def make_cache(model, **kwargs):
    """A RingCache full of NaN, in every format: nothing may be read before it is written."""
    cache = RingCache.from_model(model, **kwargs)
    for layer in cache.layers:
        layer.ring.fill_(0xFF)
    return cache


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def forward(model, cache, ids, **kwargs):
    """Logits [B, q_len, V] of new tokens."""
    return model(input_ids=ids, **{cache_kwarg(model): cache}, **kwargs).logits


def decode(step, logits, steps):
    """Greedy tokens [B, steps + 1], the first one from `logits`, and the logits [B, steps + 1, V] that chose them."""
    chosen, tokens = [logits[:, -1:]], [logits[:, -1:].argmax(-1)]
    for _ in range(steps):
        chosen.append(step(tokens[-1]))
        tokens.append(chosen[-1].argmax(-1))
    return torch.cat(tokens, 1), torch.cat(chosen, 1)


def stock_logits(model, ids, **kwargs):
    """Logits of stock eager attention over whole sequences, without a cache."""
    ring = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=ids, use_cache=False, **kwargs).logits
    finally:
        model.set_attn_implementation(ring)


def assert_greedy(model, ids, tokens, logits):
    """`tokens`, chosen by `logits` after the prompt `ids`, are the greedy tokens of stock eager attention."""
    expected = stock_logits(model, torch.cat([ids, tokens], 1))[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(tokens, expected.argmax(-1))
