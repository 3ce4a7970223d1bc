"""Tiny random transformers models, a RingCache for them, and what stock attention says: shared by its tests."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import transformers
from transformers import PreTrainedModel
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
    "tie_word_embeddings": False,  # or the next token is the last one, again and again, whatever attention gives
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
TYPES = {"layer_types": MIXED}
# The class of the config, by name, as not every version of transformers has it, and fields.
CONFIGS = {
    "gemma3": ("Gemma3TextConfig", {**TYPES, "query_pre_attn_scalar": 64}),
    "gemma2": (
        "Gemma2Config",
        {**TYPES, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
    ),
    "gpt_oss": (  # as many query heads to a KV head as in the published ones
        "GptOssConfig",
        {**TYPES, "num_attention_heads": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mistral": ("MistralConfig", {}),
    "olmo3": ("Olmo3Config", TYPES),
    "cohere2": ("Cohere2Config", {**TYPES, "sliding_window": 23}),
    "ministral": ("MinistralConfig", TYPES),
    "exaone4": ("Exaone4Config", {**TYPES, "sliding_window": 37}),
    "granite_swa": ("GraniteSWAConfig", TYPES),
    "phi3": ("Phi3Config", {"head_dim": 8}),  # one projection for q, k and v
    # More KV heads in sliding layers than the config says, and values shorter than keys.
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**TYPES, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    # Full layers with a geometry of their own, in which keys and values have one projection.
    "gemma4": (
        "Gemma4TextConfig",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB,
            "use_bidirectional_attention": "vision",  # not that of text
        },
    ),
    # One vector is key and value.
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention"] * 3,
            "mlp_layer_types": ["moe"] * 3,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
        },
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


def make_config(name: str = "gemma3", layers: int = 3, **changes):
    """Skips the test where this version of transformers has no such model."""
    class_name, fields = CONFIGS[name]
    config_class = getattr(transformers, class_name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    fields = {**SMALL, **fields, "num_hidden_layers": layers, **changes}
    for per_layer in ("layer_types", "mlp_layer_types"):
        if per_layer in fields:
            fields[per_layer] = fields[per_layer][:layers]
    return config_class(**fields)


def make_model(name: str = "gemma3", dtype: torch.dtype = torch.float32, layers: int = 3, **changes) -> PreTrainedModel:
    """Random weights; skips as `make_config` does."""
    torch.manual_seed(0)
    config = make_config(name, layers, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.get_output_embeddings().weight.data[0] = 0  # no padding is generated: without a mask it is taken for one
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
