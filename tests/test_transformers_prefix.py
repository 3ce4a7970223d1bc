"""Sequences that move from one RingCache to another."""

from __future__ import annotations

import io

import pytest
import torch
from ring_models import (
    decode,
    forward,
    make_cache,
    make_model,
    prompt,
    small_runs,  # noqa: F401  a fixture
    stock_logits,
)

from swa_inductor import InvalidArgumentError
from swa_inductor.integrations.transformers import cache_kwarg


def through_a_file(prefix):
    file = io.BytesIO()
    torch.save(prefix, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(model, cache, token, steps=20):
    return decode(lambda t: forward(model, cache, t), forward(model, cache, token), steps)


@pytest.mark.parametrize("kv_format", ["fp32", "mxfp8"])
@pytest.mark.parametrize("length", [7, 40])
def test_conversations_go_on_as_if_uninterrupted(length, kv_format):
    model = make_model()
    cache, other = (make_cache(model, batch_size=2, max_length=100, kv_format=kv_format) for _ in range(2))
    tokens, _ = decode(lambda t: forward(model, cache, t), forward(model, cache, prompt(2, length)), 4)
    prefixes = [through_a_file(cache.export_prefix(row)) for row in range(2)]
    last = tokens[:, -1:]
    wanted, wanted_logits = go_on(model, cache, last)
    forward(model, other, prompt(2, 50, seed=9))  # what it held before must not matter
    other.reset()
    for row in (0, 1):
        other.import_prefix(row, prefixes[row])
    got, logits = go_on(model, other, last)
    assert torch.equal(got, wanted) and torch.equal(logits, wanted_logits)
    for a, b in zip(cache.layers, other.layers, strict=True):
        written = min(a.spec.rows, length + 25)
        assert torch.equal(a.ring[:, :written], b.ring[:, :written])
    other.reset()
    for row in (0, 1):
        other.import_prefix(row, prefixes[1 - row])
    assert torch.equal(go_on(model, other, last.flip(0))[0], wanted.flip(0))


def test_a_shared_prompt_is_computed_once():
    model, shared = make_model(), prompt(1, 30)
    one, cache = (make_cache(model, batch_size=size, max_length=100) for size in (1, 3))
    forward(model, one, shared)
    prefix = one.export_prefix(0)
    assert [ring.shape[0] for ring in prefix["rings"]] == [17, 30, 17]  # no row that was never written
    own = prompt(3, 12, seed=2)
    ids = torch.cat([shared.expand(3, -1), own], 1)
    for _ in range(2):
        for row in range(3):
            cache.import_prefix(row, prefix)
        torch.testing.assert_close(forward(model, cache, own), stock_logits(model, ids)[:, 30:], atol=2e-3, rtol=1e-3)
        cache.reset()
    for row in range(3):
        cache.import_prefix(row, prefix)
    out = model.generate(ids, **{cache_kwarg(model): cache}, do_sample=False, max_new_tokens=10)
    assert torch.equal(out[:, 42:], stock_logits(model, out)[:, 41:-1].argmax(-1))


@pytest.mark.parametrize("lengths", [(30, 23), (5, 37)])
def test_sequences_of_different_length_go_on_together(lengths):
    model = make_model()
    cache = make_cache(model, batch_size=2, max_length=100)
    sequences = [prompt(1, length, seed=length) for length in lengths]
    mask = torch.zeros(2, max(lengths), dtype=torch.int64)
    for row, ids in enumerate(sequences):
        one = make_cache(model, batch_size=1, max_length=100)
        forward(model, one, ids)
        cache.import_prefix(row, one.export_prefix(0))
        mask[row, max(lengths) - lengths[row] :] = 1
    for width in (8, 1, 1):
        new = prompt(2, width, seed=width)
        mask = torch.cat([mask, torch.ones(2, width, dtype=torch.int64)], 1)
        position_ids = (mask.cumsum(1) - 1)[:, -width:]
        logits = forward(model, cache, new, attention_mask=mask, position_ids=position_ids)
        for row in range(2):
            sequences[row] = torch.cat([sequences[row], new[row : row + 1]], 1)
            alone = stock_logits(model, sequences[row])[0, -width:]
            torch.testing.assert_close(logits[row], alone, atol=2e-3, rtol=1e-3)


def test_a_prefix_can_be_cropped_as_far_as_its_origin():
    model, ids = make_model(), prompt(1, 44)
    first, second = (make_cache(model, batch_size=1, max_length=100, tokens_per_step=4) for _ in range(2))
    forward(model, first, ids)
    first.crop(-2)
    second.import_prefix(0, first.export_prefix(0))
    for cache in (first, second):
        with pytest.raises(InvalidArgumentError, match=r"at most 5 .*\[44\] written"):
            cache.crop(-4)
        cache.crop(-3)
        assert cache.get_seq_length().item() == 39
        logits = forward(model, cache, ids[:, 39:40])
        torch.testing.assert_close(logits, stock_logits(model, ids[:, :40])[:, -1:], atol=2e-3, rtol=1e-3)


def test_other_geometries_are_refused():
    model = make_model()
    cache = make_cache(model, batch_size=2, max_length=50)
    forward(model, cache, prompt(2, 20))
    prefix = cache.export_prefix(1)
    for row in (-1, 2):
        for call in (cache.export_prefix, lambda row: cache.import_prefix(row, prefix)):
            with pytest.raises(InvalidArgumentError, match=f"row: got {row}; allowed: 0 to 1"):
                call(row)
    for change, message in (
        ({"kv_format": "bf16"}, "layer 0: got kv_format='fp32'; allowed: kv_format='bf16'"),
        ({"max_length": 60}, "layer 1: got window=50, ring_rows=51; allowed: window=60, ring_rows=61"),
        ({"tokens_per_step": 2}, "layer 0: got tokens_per_step=1, ring_rows=17; allowed: tokens_per_step=2"),
    ):
        other = make_cache(model, **{"batch_size": 2, "max_length": 50, **change})
        with pytest.raises(InvalidArgumentError, match=message):
            other.import_prefix(0, prefix)
        assert all((layer.ring == 0xFF).all() for layer in other.layers)
        assert other.state.lengths.tolist() == [0, 0]
    fewer = make_cache(make_model(layers=2), batch_size=2, max_length=50)
    with pytest.raises(InvalidArgumentError, match="prefix layers: got 3; allowed: 2"):
        fewer.import_prefix(0, prefix)
