"""RingCache against stock transformers on tiny random models: same tokens, same logits, nothing lost in silence."""

from __future__ import annotations

import pytest
import torch
from ring_models import (
    assert_greedy,
    decode,
    forward,
    make_cache,
    make_model,
    prompt,
    small_runs,  # noqa: F401  a fixture
    stock_logits,
)
from torch._dynamo.testing import CompileCounterWithBackend

from swa_inductor import InvalidArgumentError, api, records

# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("mimo_v2_flash", [(4, 32, 16), (2, 32, 16), (4, 32, 16)]),
        ("gemma4", [(1, 64, 64), (2, 32, 32), (1, 64, 64)]),
        ("deepseek_v4", [(1, 32, None)] * 3),
    ],
)
def test_heads_are_those_of_the_attention_modules(name, heads):
    cache = make_cache(make_model(name), batch_size=1, max_length=40)
    specs = [layer.spec for layer in cache.layers]
    assert [(spec.num_kv_heads, spec.head_dim, spec.v_head_dim) for spec in specs] == heads


def test_an_eager_prefill_waits_for_the_device_once_not_in_every_layer(monkeypatch):
    reads, to_int = [], torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda t: (reads.append(1), to_int(t))[1])
    monkeypatch.setattr(api, "store", lambda *args, **kwargs: None)  # on the CPU it reads what it checks
    for layers in (1, 3):
        model = make_model("mistral", layers=layers)
        cache = make_cache(model, batch_size=2, max_length=100)
        for longest in (0, 20):
            reads.clear()
            forward(model, cache, prompt(2, 20))
            assert cache.state.longest == longest and len(reads) == 1


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


@pytest.mark.parametrize(
    ("name", "layers", "kv_format", "backend"),
    [
        ("gemma3", 1, "mxfp8", "inductor"),
        ("gemma3", 2, "mxfp8", "aot_eager"),
        ("gpt_oss", 2, "bf16", "aot_eager"),
        ("mimo_v2_flash", 2, "fp32", "aot_eager"),
        ("deepseek_v4", 1, "mxfp8", "eager"),
    ],
)
def test_compiled_prefill_is_the_eager_one(name, layers, kv_format, backend):
    """Two ways to compute it: the op in a trace, a band of keys in eager mode. Chunks; one is padded on the left."""
    model, ids = make_model(name, layers=layers), prompt(2, 55)
    eager, traced = (make_cache(model, batch_size=2, max_length=64, kv_format=kv_format) for _ in range(2))
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[1, :9] = 0

    def uncompiled(tokens):
        return forward(model, eager, tokens, attention_mask=mask)

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(tokens):
        return forward(model, traced, tokens, attention_mask=mask)

    start = 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for part in map(torch.clone, ids.split([24, 9, 20, 2], 1)):
            real = mask[:, start : start + part.shape[1]].bool()
            torch._dynamo.mark_dynamic(part, 1)  # one graph for chunks of all lengths
            wanted, logits = (f(part)[real] for f in (uncompiled, compiled))
            torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=1e-3)
            assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
            start += part.shape[1]
    assert torch.equal(traced.layers[0].ring, eager.layers[0].ring)
    for a, b in zip(traced.layers, eager.layers, strict=True):  # deeper layers store what differs by rounding
        spec = a.spec
        for x, y in zip(
            records.decode_record(a.ring, kv_format, spec.head_dim, spec.v_head_dim),
            records.decode_record(b.ring, kv_format, spec.head_dim, spec.v_head_dim),
            strict=True,
        ):
            torch.testing.assert_close(x, y, atol=2e-3, rtol=0.13, equal_nan=True)


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
