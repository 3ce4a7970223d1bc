"""RingCache against stock transformers on tiny random models: same tokens, same logits, nothing lost in silence."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Olmo3Config,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask
from transformers.models.auto import AutoModelForCausalLM

from swa_inductor import InvalidArgumentError, UnsupportedError
from swa_inductor.integrations.transformers import IMPLEMENTATION, RingCache, cache_kwarg, use_stock

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
    config.num_hidden_layers = layers
    if name != "mistral":
        config.layer_types = MIXED[:layers]
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


# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_stock_eager(name):
    model, ids = make_model(name), prompt(2, 40)
    cache = make_cache(model, batch_size=2, max_length=100)
    tokens, logits = decode(lambda t: forward(model, cache, t), forward(model, cache, ids), 44)
    assert_greedy(model, ids, tokens, logits)
    assert cache.get_seq_length().item() == 84


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 33], [20, 3, 1, 4, 12], [4] * 10, [3, 37]])
@pytest.mark.parametrize("kv_format", ["fp32", "mxfp8"])
def test_any_split_of_a_prompt_gives_the_same_logits(chunks, kv_format):
    model, ids = make_model(), prompt(2, 40)
    cache = make_cache(model, batch_size=2, max_length=40, tokens_per_step=4, kv_format=kv_format)
    whole = forward(model, cache, ids)
    cache.reset()
    parts = torch.cat([forward(model, cache, part) for part in ids.split(chunks, 1)], 1)
    torch.testing.assert_close(parts, whole, atol=2e-3, rtol=1e-3)
    error = (whole - stock_logits(model, ids)).abs().max().item()
    assert (error < 2e-3) == (kv_format == "fp32")


def test_conversation_goes_on_with_a_second_prompt():
    model, first, second = make_model(), prompt(2, 23), prompt(2, 30, seed=2)
    cache = make_cache(model, batch_size=2, max_length=100)
    answer, _ = decode(lambda t: forward(model, cache, t), forward(model, cache, first), 5)
    ids = torch.cat([first, answer[:, :-1], second], 1)
    tokens, logits = decode(lambda t: forward(model, cache, t), forward(model, cache, second), 20)
    assert_greedy(model, ids, tokens, logits)


def test_bf16_model_keeps_bf16_records():
    model, ids = make_model(dtype=torch.bfloat16), prompt(2, 31)
    cache = make_cache(model, batch_size=2, max_length=64)
    assert [layer.spec.kv_format for layer in cache.layers] == ["bf16"] * 3
    logits = torch.cat([forward(model, cache, ids[:, :30]), forward(model, cache, ids[:, 30:])], 1)
    exact = stock_logits(make_model(), ids)
    stock_error = (stock_logits(model, ids) - exact).abs().mean()
    assert (logits - exact).abs().mean() < 1.2 * stock_error


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences_are_those_alone(side, tokens_per_step):
    """Two prompts, answers, then two more prompts, of different lengths, the short one padded."""
    model = make_model()
    cache = make_cache(model, batch_size=3, max_length=100, tokens_per_step=tokens_per_step)
    sequences = [torch.empty(1, 0, dtype=torch.int64) for _ in range(3)]
    mask = torch.empty(3, 0, dtype=torch.int64)
    for turn, lengths in enumerate([(40, 19, 3), (1, 1, 1), (1, 1, 1), (2, 25, 4), (3, 1, 2), (0, 2, 1), (1, 1, 1)]):
        width = max(lengths)
        ids, new = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
        for b, n in enumerate(lengths):
            columns = slice(width - n, width) if side == "left" else slice(0, n)
            ids[b, columns], new[b, columns] = prompt(1, n, seed=10 * turn + b), 1
            sequences[b] = torch.cat([sequences[b], ids[b : b + 1, columns]], 1)
        mask = torch.cat([mask, new], 1)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        logits = forward(model, cache, ids, attention_mask=mask, position_ids=position_ids)
        for b, n in enumerate(lengths):
            alone = stock_logits(model, sequences[b])[0, sequences[b].shape[1] - n :]
            torch.testing.assert_close(logits[b][new[b].bool()], alone, atol=2e-3, rtol=1e-3)
    assert cache.state.lengths.tolist() == [s.shape[1] for s in sequences]


# ---------------------------------------------------------------------------------------------------- compiled


def tensors(cache):
    """The tensors that a forward writes."""
    return [layer.ring for layer in cache.layers] + [cache.state.lengths, cache.state.high_water, cache.state.columns]


@pytest.mark.parametrize(("name", "backend"), [("gemma3", "inductor"), ("gpt_oss", "aot_eager")])
def test_compiled_step_compiles_once_and_keeps_its_addresses(name, backend):
    model, ids = make_model(name, layers=2), prompt(2, 40)
    cache = make_cache(model, batch_size=2, max_length=100)
    addresses = [t.data_ptr() for t in tensors(cache)]
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(lambda t: forward(model, cache, t), fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(2):
            tokens, logits = decode(step, forward(model, cache, ids), 60)
            assert_greedy(model, ids, tokens, logits)
            if turn == 0:
                cache.reset()  # and again, with the same code
        with pytest.raises(RuntimeError, match="positions of the new tokens"):
            step(tokens[:, -1:].contiguous())  # number 101
    assert counter.frame_count == 1
    assert [t.data_ptr() for t in tensors(cache)] == addresses
    # What CUDA graphs need in order to take a mutated input as it lies, without a copy and a second recording.
    assert all(getattr(t, "_dynamo_static_input_type", None) is not None for t in tensors(cache))


def test_compiled_forward_serves_prompt_steps_and_padding_masks():
    model, ids = make_model(layers=2), prompt(2, 33)
    cache = make_cache(model, batch_size=2, max_length=64)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(tokens, mask):
        return forward(model, cache, tokens, attention_mask=mask)

    mask = torch.ones(2, 64, dtype=torch.int64)  # as wide as it will ever be
    logits = torch.cat([compiled(ids[:, :30], mask), *(compiled(ids[:, i : i + 1], mask) for i in range(30, 33))], 1)
    torch.testing.assert_close(logits, stock_logits(model, ids), atol=2e-3, rtol=1e-3)
    mask[1, 3] = 0  # history, already stored
    with pytest.raises(RuntimeError, match="not allowed"):
        compiled(ids[:, :1], mask)


# ---------------------------------------------------------------------------------------------------- generate


def generate(model, cache, ids, **kwargs):
    return model.generate(ids, **{cache_kwarg(model): cache}, do_sample=False, max_new_tokens=24, **kwargs)


def test_generate_with_prompts_of_different_length_again_after_reset():
    model = make_model()
    cache = make_cache(model, batch_size=2, max_length=80)
    ids, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.int64)
    ids[1, :21], mask[1, :21] = 0, 0
    for _ in range(2):
        out = generate(model, cache, ids, attention_mask=mask)
        for b in range(2):
            sequence = out[b : b + 1, mask[b].argmax() :]
            length = int(mask[b].sum())
            greedy = stock_logits(model, sequence)[:, length - 1 : -1].argmax(-1)
            assert torch.equal(sequence[:, length:], greedy)
        cache.reset()


def test_generate_with_prompt_lookup_rolls_back():
    model, ids = make_model(), prompt(1, 20).repeat(1, 2)
    cache = make_cache(model, batch_size=1, max_length=80, tokens_per_step=4)
    removed = []
    crop = cache.crop
    cache.crop = lambda n: (removed.append(n), crop(n))
    out = generate(model, cache, ids, prompt_lookup_num_tokens=3)
    assert min(removed) < 0
    assert torch.equal(out[:, 40:], stock_logits(model, out)[:, 39:-1].argmax(-1))


# ---------------------------------------------------------------------------------------------------- roll back


def test_crop_is_exact_as_far_as_the_rings_reach():
    model, ids = make_model(), prompt(2, 60)
    cache = make_cache(model, batch_size=2, max_length=100, tokens_per_step=4)
    expected = stock_logits(model, ids)
    assert cache.is_croppable
    forward(model, cache, prompt(2, 18, seed=3))  # not wrapped yet: all of it can go
    cache.crop(0)
    assert cache.state.lengths.tolist() == [18, 18]
    cache.crop(-18)
    forward(model, cache, ids[:, :40])
    forward(model, cache, prompt(2, 4, seed=4))  # drafts
    with pytest.raises(InvalidArgumentError, match=r"-6, back to \[38, 38\].*at most 5 .*\[44, 44\].*R=20.*W=16"):
        cache.crop(-6)
    cache.crop(-2)
    cache.crop(-3)
    with pytest.raises(InvalidArgumentError, match="tokens_to_remove"):
        cache.crop(-1)  # the rows below are gone for good
    assert cache.get_seq_length().item() == 39
    logits = torch.cat([forward(model, cache, part) for part in ids[:, 39:].split([1, 4, 16], 1)], 1)
    torch.testing.assert_close(logits, expected[:, 39:], atol=2e-3, rtol=1e-3)
    cache.crop(-5)
    for wrong in (1, -56):
        with pytest.raises(InvalidArgumentError, match="tokens_to_remove"):
            cache.crop(wrong)


def test_forward_after_one_that_broke_off_is_exact_or_refused():
    model, ids = make_model(), prompt(2, 60)
    cache = make_cache(model, batch_size=2, max_length=100)
    forward(model, cache, ids[:, :30])

    def broken(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(broken)
    for length in (1, 20):
        with pytest.raises(KeyboardInterrupt):
            forward(model, cache, prompt(2, length, seed=5))
        if length == 1:
            hook.remove()
            logits = forward(model, cache, ids[:, 30:31])
            torch.testing.assert_close(logits, stock_logits(model, ids[:, :31])[:, -1:], atol=2e-3, rtol=1e-3)
            hook = model.model.layers[1].register_forward_pre_hook(broken)
    hook.remove()
    with pytest.raises(InvalidArgumentError, match="not overwritten"):
        forward(model, cache, ids[:, 31:32])
    cache.reset()
    torch.testing.assert_close(forward(model, cache, ids), stock_logits(model, ids), atol=2e-3, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------- limits


def test_no_sequence_outgrows_max_length():
    model, ids = make_model(), prompt(2, 32)
    cache = make_cache(model, batch_size=2, max_length=32)
    assert cache.get_max_length() == 32
    forward(model, cache, ids)
    before = [layer.ring.clone() for layer in cache.layers]
    with pytest.raises(InvalidArgumentError, match=r"\[32, 32\] to \[32, 32\].*below max_length=32"):
        forward(model, cache, ids[:, :1])
    assert all(torch.equal(layer.ring, ring) for layer, ring in zip(cache.layers, before, strict=True))
    cache.reset()
    with pytest.raises(InvalidArgumentError, match=r"to \[39, 39\].*below max_length=32"):
        forward(model, cache, prompt(2, 40))


def test_sliding_layers_alone_have_no_limit():
    model, ids = make_model("mistral"), prompt(1, 50)
    cache = make_cache(model, batch_size=1, max_length=20)
    assert cache.get_max_length() == -1
    logits = torch.cat([forward(model, cache, part) for part in ids.split([30, 1, 19], 1)], 1)
    torch.testing.assert_close(logits, stock_logits(model, ids), atol=2e-3, rtol=1e-3)
    short = make_cache(model, batch_size=1, max_length=10)  # below the window: the window is cut
    assert (short.get_max_length(), short.layers[0].spec.window) == (10, 10)
    torch.testing.assert_close(forward(model, short, ids[:, :10]), logits[:, :10], atol=2e-3, rtol=1e-3)
    with pytest.raises(InvalidArgumentError, match="max_length=10"):
        forward(model, short, ids[:, :1])


def test_cache_bytes_and_layers():
    model = make_model()
    rows, record = {"sliding_attention": WINDOW + 2, "full_attention": 50 + 2}, 2 * (32 + 1)
    cache = make_cache(model, batch_size=3, max_length=50, tokens_per_step=2, kv_format="mxfp8")
    assert cache.cache_bytes == sum(3 * rows[layer_type] * 2 * record for layer_type in MIXED)
    assert cache.is_sliding == [True, False, True]
    assert cache.is_compileable and cache.batch_size == 3 and len(cache) == 3


# ---------------------------------------------------------------------------------------------------- refusals


def test_other_caches_and_batches_are_refused():
    model, ids = make_model(), prompt(2, 20)
    cache = make_cache(model, batch_size=2, max_length=50)
    for wrong in (None, DynamicCache(config=model.config)):
        with pytest.raises(InvalidArgumentError, match="RingCache"):
            forward(model, wrong, ids, use_cache=wrong is not None)
        positions = torch.arange(20).expand(2, 1, 1, 20)  # a prepared mask goes past the mask function
        with pytest.raises(InvalidArgumentError, match="RingCache"):
            forward(model, wrong, ids, attention_mask=dict.fromkeys(MIXED, positions), use_cache=wrong is not None)
    for wrong in (prompt(1, 20), prompt(3, 20)):
        with pytest.raises(InvalidArgumentError, match="batch size"):
            forward(model, cache, wrong)
    for call in (cache.reorder_cache, cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(UnsupportedError, match="beam search"):
            call(torch.tensor([0]))
    with pytest.raises(UnsupportedError, match="RingCache"):
        cache.layers[0].reset()
    use_stock(model)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(Exception):  # noqa: B017  whatever stock attention says to a NewKV
        forward(model, cache, ids)
    assert cache.state.lengths.tolist() == [0, 0]
    use_stock(model)  # twice is no harm
    torch.testing.assert_close(model(input_ids=ids).logits, stock_logits(model, ids))
    make_cache(model, batch_size=2, max_length=50)
    make_cache(model, batch_size=1, max_length=50)
    assert model.config._attn_implementation == IMPLEMENTATION
    use_stock(model)
    assert model.config._attn_implementation == "eager"


def test_no_mask_is_lost():
    model, ids = make_model(), prompt(2, 20)
    cache = make_cache(model, batch_size=2, max_length=50)
    forward(model, cache, ids)
    name = next(n for n in inspect.signature(create_causal_mask).parameters if n in ("cache", "past_key_values"))
    args = {"config": model.config, "inputs_embeds": torch.empty(2, 3, 0), "attention_mask": None, name: cache}
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        assert create(**args).tolist() == [[[[20, 21, 22]]]] * 2
        for overlay in ("or_mask_function", "and_mask_function"):
            with pytest.raises(UnsupportedError, match="overlay"):
                create(**args, **{overlay: lambda b, h, q, k: q >= k})
        with pytest.raises(UnsupportedError, match="blocks"):
            create(**args, block_sequence_ids=torch.zeros(2, 3, dtype=torch.int64))
        packed = {**args, name: None, "position_ids": torch.tensor([[0, 1, 0]] * 2)}
        with pytest.raises(InvalidArgumentError, match="RingCache"):
            create(**packed)
    with pytest.raises(UnsupportedError, match="bidirectional"):
        create_bidirectional_mask(**args)
    for custom in (torch.ones(2, 1, 1, 21, dtype=torch.bool), torch.full((2, 1, 1, 1), 20.0)):
        with pytest.raises(UnsupportedError, match="4-D mask"):
            forward(model, cache, ids[:, :1], attention_mask=custom)
    stale = create_causal_mask(**{**args, "inputs_embeds": torch.empty(2, 1, 0)})
    forward(model, cache, ids[:, :1], attention_mask={"full_attention": stale, "sliding_attention": stale})
    with pytest.raises(InvalidArgumentError, match=r"from \[21, 21\] on"):
        forward(model, cache, ids[:, :1], attention_mask={"full_attention": stale, "sliding_attention": stale})


def test_padding_masks_that_do_not_fit_are_refused():
    model, ids = make_model(), prompt(2, 20)
    cache = make_cache(model, batch_size=2, max_length=50)
    holes = torch.ones(2, 20, dtype=torch.int64)
    holes[1, 7] = 0
    narrow, forgets = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 23, dtype=torch.int64)
    forgets[0, 4] = 0
    with pytest.raises(InvalidArgumentError, match="one run"):
        forward(model, cache, ids, attention_mask=holes)
    forward(model, cache, ids)
    with pytest.raises(InvalidArgumentError, match="3 columns.*23 columns or more"):
        forward(model, cache, ids[:, :3], attention_mask=narrow)
    with pytest.raises(InvalidArgumentError, match=r"\[19, 20\] tokens of history.*\[20, 20\] tokens of history"):
        forward(model, cache, ids[:, :3], attention_mask=forgets)
    with pytest.raises(InvalidArgumentError, match="attention_mask shape"):
        forward(model, cache, ids[:, :1], attention_mask=torch.ones(1, 21, dtype=torch.int64))


def test_training_is_refused():
    model, ids = make_model().requires_grad_(True), prompt(2, 20)
    cache = make_cache(model, batch_size=2, max_length=50)
    with pytest.raises(UnsupportedError, match="inference"):
        forward(model, cache, ids)
    with torch.inference_mode():
        forward(model, cache, ids)
    with torch.no_grad():
        forward(model, cache, ids[:, :1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention", "full_attention"]}, "layer 1 is 'linear_attention'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer 0 is 'chunked_attention'"),
        ({"layer_types": ["compressed_sparse_attention"] * 3}, "compressed_sparse_attention"),
        ({"num_kv_shared_layers": 1}, "share"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"is_causal": False}, "bidirectional"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_that_rings_cannot_serve_are_refused(change, reason):
    model = make_model()
    for name, value in change.items():
        model.config.__dict__[name] = value
    with pytest.raises(UnsupportedError, match=reason):
        make_cache(model, batch_size=1, max_length=50)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"max_length": 0}, {"tokens_per_step": 0}, {"kv_format": "int3"}, {"max_length": 2.5}]
)
def test_wrong_arguments_are_refused(wrong):
    model = make_model()
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        make_cache(model, **{"batch_size": 1, "max_length": 50, **wrong})
