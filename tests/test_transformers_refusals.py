"""What a RingCache cannot serve is refused, before it gives a wrong answer."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from ring_models import (
    MIXED,
    WINDOW,
    forward,
    make_cache,
    make_model,
    prompt,
    small_runs,  # noqa: F401  a fixture
    stock_logits,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

from swa_inductor import InvalidArgumentError, UnsupportedError
from swa_inductor.integrations.transformers import IMPLEMENTATION, cache_kwarg, use_stock

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
    for call in (cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(UnsupportedError, match="no change of the batch"):
            call(torch.tensor([0]))
    with pytest.raises(UnsupportedError, match="RingCache"):
        cache.layers[0].reset()
    use_stock(model)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(InvalidArgumentError, match="attention implementation: got another one.*'swa_ring'"):
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
    for new in (3, 1):
        with pytest.raises(
            InvalidArgumentError, match=r"got \[19, 20\] to .*from \[20, 20\] on, which an attention_mask"
        ):
            forward(model, cache, ids[:, :new], attention_mask=forgets[:, : 20 + new])
    with pytest.raises(InvalidArgumentError, match="1 columns.*21 columns or more"):
        forward(model, cache, ids[:, :1], attention_mask=narrow[:, :1])
    with pytest.raises(InvalidArgumentError, match="attention_mask shape"):
        forward(model, cache, ids[:, :1], attention_mask=torch.ones(1, 21, dtype=torch.int64))


def test_new_keys_and_values_are_no_tensor_but_a_tuple_like_others():
    new, _ = make_cache(make_model(layers=1), batch_size=2, max_length=9).update(torch.empty(2), torch.empty(3), 0)
    assert [x.shape[0] for x in new[1:]] == [2, 3] and not hasattr(new, "nonsense")
    assert copy.copy(new).k is new.k and new._replace(k=None).k is None
    with pytest.raises(InvalidArgumentError, match="'shape'"):
        new.shape  # noqa: B018


@pytest.mark.parametrize(("layer", "window"), [(0, None), (0, 8), (1, WINDOW)])
def test_windows_that_the_config_does_not_know_are_refused(layer, window):
    model = make_model()
    cache = make_cache(model, batch_size=2, max_length=50)
    model.model.layers[layer].self_attn.sliding_window = window
    with pytest.raises(InvalidArgumentError, match=f"sliding_window: got {window}"):
        forward(model, cache, prompt(2, 20))


def test_attention_modules_that_are_not_as_usual_are_refused():
    model = make_model()
    model.model.layers[2].self_attn.head_dim = 24
    with pytest.raises(UnsupportedError, match="64 key and 64 value features, head_dim 24"):
        make_cache(model, batch_size=2, max_length=50)
    model = make_model()
    del model.model.layers[1].self_attn.k_proj
    with pytest.raises(UnsupportedError, match="layer 1 has no attention module"):
        make_cache(model, batch_size=2, max_length=50)


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


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_compressed_layers_are_refused(kind):
    model = make_model("deepseek_v4", layer_types=["sliding_attention", kind, "sliding_attention"])
    with pytest.raises(UnsupportedError, match=f"deepseek_v4: layer 1 is '{kind}', whose compressed keys are no ring"):
        make_cache(model, batch_size=1, max_length=50)
    assert model.config._attn_implementation == "eager"


def test_a_projection_of_keys_and_values_that_differ_is_refused():
    model = make_model("deepseek_v4", layers=1)
    cache = make_cache(model, batch_size=1, max_length=50)
    with pytest.raises(UnsupportedError, match="layer 0: one projection makes keys and values, which are not the same"):
        cache.update(torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2, 32), 0)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"max_length": 0}, {"tokens_per_step": 0}, {"kv_format": "int3"}, {"max_length": 2.5}]
)
def test_wrong_arguments_are_refused(wrong):
    model = make_model()
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        make_cache(model, **{"batch_size": 1, "max_length": 50, **wrong})


def test_models_over_several_devices_or_without_a_cache_are_refused():
    model = make_model()
    model.model.norm.to("meta")
    with pytest.raises(UnsupportedError, match=r"a model on \['cpu', 'meta'\]: a cache of rings lives on one device"):
        make_cache(model, batch_size=1, max_length=50)
    with pytest.raises(UnsupportedError, match="Linear.forward takes no cache"):
        cache_kwarg(torch.nn.Linear(2, 2))


def test_attention_of_another_kind_is_refused():
    model = make_model()
    cache = make_cache(model, batch_size=1, max_length=50)
    for more in ("cu_seq_lens_q", "position_bias"):
        with pytest.raises(UnsupportedError, match=f"attention with one of .*{more}"):
            forward(model, cache, prompt(1, 20), **{more: torch.zeros(2)})
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedError, match="bidirectional attention"):
        forward(model, cache, prompt(1, 20))
    assert all((layer.ring == 0xFF).all() for layer in cache.layers)
