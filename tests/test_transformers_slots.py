"""transformers models behind DecodeStep: same greedy tokens as stock eager attention, with drafts, packed."""

from __future__ import annotations

import pytest
import torch
from ring_models import (
    CONFIGS,
    VOCAB,
    WINDOW,
    make_cache,
    make_model,
    small_runs,  # noqa: F401  a fixture
    stock_logits,
)
from serving_runs import Host, prefill, prompt
from torch._dynamo.testing import CompileCounterWithBackend

from swa_inductor import InvalidArgumentError, PrefillMetadata, UnsupportedError
from swa_inductor.integrations.transformers import TransformersSlotModel, cache_kwarg, use_stock
from swa_inductor.serving import DecodeStep, SlotModel


def slot_model(name: str = "gemma3", layers: int = 3, **changes) -> TransformersSlotModel:
    """Rings full of NaN codes."""
    options = {"num_slots": 4, "max_length": 90, "tokens_per_step": 3}
    model = TransformersSlotModel(make_model(name, layers=layers), **{**options, **changes})
    model.cache.rings.fill_(0xFF)
    return model


def stock(model: TransformersSlotModel, tokens: list[int]) -> torch.Tensor:
    return stock_logits(model.model, torch.tensor([tokens]))[0]


def play(host: Host) -> None:
    """Three sequences, one of which joins later and one of which is left out at times; greedy as stock says."""
    model = host.step.model
    sequences = {2: (prompt(40, 1, VOCAB), 80), 0: (prompt(3, 2, VOCAB), 50), 3: (prompt(17, 3, VOCAB), 90)}
    for slot in (2, 0):
        host.start(slot, *sequences[slot], chunk=25)
    for i in range(4):
        host.run([2, 0] if i % 2 else [2])
    host.start(3, *sequences[3])
    host.finish([3, 2, 0])
    for slot, (tokens, limit) in sequences.items():
        generated = host.generated[slot]
        assert len(tokens) + len(generated) == limit
        assert generated == stock(model, tokens + generated).argmax(-1)[len(tokens) - 1 : -1].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_stock_eager(name: str) -> None:
    host = Host(DecodeStep(slot_model(name), buckets=(1, 4), compile=False, ngram=2))
    play(host)
    assert 0 < host.accepted <= host.drafts and host.step.error_count() == 0


@pytest.mark.parametrize(("name", "backend"), [("gemma3", "aot_eager"), ("gpt_oss", "eager"), ("mistral", "eager")])
def test_traced_steps_and_prefills(name: str, backend: str) -> None:
    """One graph per bucket, whatever the lengths; prefill is one graph for every batch of its size."""
    model = slot_model(name, layers=2)
    step = DecodeStep(model, buckets=(1, 4), ngram=2)
    counter = CompileCounterWithBackend(backend)
    step._run = torch.compile(step._step, fullgraph=True, dynamic=False, backend=counter)
    step.warm_up()
    assert counter.frame_count == 2
    host = Host(step)
    play(host)
    assert 0 < host.accepted <= host.drafts and host.step.error_count() == 0
    assert counter.frame_count == 2
    prefills = CompileCounterWithBackend(backend)
    packed = torch.compile(model.prefill, fullgraph=True, dynamic=False, backend=prefills)
    tokens = prompt(40, 5, VOCAB)
    logits = []
    for end in (16, 32, 40):
        start = (end - 1) // 16 * 16
        metadata = PrefillMetadata.build(
            model.spec, num_slots=4, state_ids=[1], q_lens=[end - start], k_lens=[end], num_tokens=16
        )
        new = torch.tensor((tokens[start:end] + [0] * 16)[:16])
        with torch.no_grad():
            logits.append(packed(new, metadata, torch.tensor([end - start - 1]))[0])
    assert prefills.frame_count == 1
    torch.testing.assert_close(torch.stack(logits), stock(model, tokens)[[15, 31, 39]], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kv_format", ["mxfp8", "bf16", "fp32"])
def test_mixed_prefills(kv_format: str) -> None:
    """Several sequences at different offsets in one row; logits are near stock, and exact for fp32 records."""
    model = slot_model(kv_format=kv_format)
    a, b = prompt(50, 1, VOCAB), prompt(9, 2, VOCAB)
    prefill(model, [(3, a[:20], 20)])
    logits = prefill(model, [(0, b, 9), (3, a, 30)], padding=4)
    want = torch.stack([stock(model, b)[-1], stock(model, a)[-1]])
    error = (logits - want).abs().max() / want.abs().max()
    assert error < {"mxfp8": 0.2, "bf16": 0.02, "fp32": 1e-5}[kv_format]
    assert (error < 1e-4) == (kv_format == "fp32")


@pytest.mark.parametrize("traced", [False, True])
def test_prefill_from_a_valid_start_on(traced: bool) -> None:
    """A12: nothing before it is read, from NaN codes neither; rotary positions are relative: the tokens from it on."""
    model = slot_model()
    run = torch.compile(model.prefill, backend="eager", fullgraph=True) if traced else model.prefill
    tokens, start = prompt(40, 1, VOCAB), 13
    for first, end in ((start, 20), (20, 40)):
        metadata = PrefillMetadata.build(
            model.spec, num_slots=4, state_ids=[2], q_lens=[end - first], k_lens=[end], valid_start=[start]
        )
        with torch.no_grad():
            logits = run(torch.tensor(tokens[first:end]), metadata, torch.tensor([end - first - 1]))
    torch.testing.assert_close(logits[0], stock(model, tokens[start:])[-1], atol=2e-3, rtol=1e-3)


def test_other_slots_keep_their_bytes() -> None:
    """D13, F9: prefill and steps of one slot leave every other byte of the state alone."""
    model = slot_model()
    host = Host(DecodeStep(model, buckets=(2,), compile=False))
    host.start(1, prompt(30, 1, VOCAB), 60)
    host.finish([1])
    host.run([1, -1])
    others = model.cache.rings[[0, 2, 3]]
    assert (others == 0xFF).all() and not (model.cache.rings[1] == 0xFF).all()


def test_attributes() -> None:
    model: SlotModel = slot_model("mimo_v2_flash", kv_format="bf16", tokens_per_step=5)
    assert (model.spec.window, model.spec.tokens_per_step, model.spec.num_kv_heads) == (WINDOW, 5, 4)
    assert (model.num_slots, model.max_length, model.vocab_size) == (4, 90, VOCAB)
    record = (32 + 16) * 2
    sliding, full = 21 * 4 * record, 95 * 2 * record
    assert 0 <= model.state_bytes - 4 * (2 * sliding + full) < 4 * 3 * 32  # padded to 32 bytes
    assert model.full_kv_bytes(1000) == 1000 * (4 + 2 + 4) * record


def test_ring_cache_and_slots_take_turns() -> None:
    """One attention implementation serves both caches of a model; stock comes back."""
    model = slot_model()
    ids = torch.tensor([prompt(30, 1, VOCAB)])
    want = stock_logits(model.model, ids)[0]
    cache = make_cache(model.model, batch_size=1, max_length=50)
    for _ in range(2):
        logits = prefill(model, [(2, ids[0].tolist(), 30)])
        torch.testing.assert_close(logits[0], want[-1], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(
            model.model(ids, **{cache_kwarg(model.model): cache}).logits[0], want, atol=2e-3, rtol=1e-3
        )
        cache.reset()
    use_stock(model.model)
    torch.testing.assert_close(model.model(ids, use_cache=False).logits[0], want)


def test_what_slots_cannot_do_is_refused() -> None:
    model = slot_model()
    name = cache_kwarg(model.model)
    ids = torch.tensor([prompt(5, 1, VOCAB)])
    at = torch.arange(5)[None]
    with pytest.raises(InvalidArgumentError, match="outside of TransformersSlotModel"):
        model.model(ids, position_ids=at, attention_mask=at[None, None], **{name: model.cache})
    with pytest.raises(UnsupportedError, match="has no length"):
        model.model(ids, **{name: model.cache})
    for method in ("reset", "reorder_cache", "crop"):
        with pytest.raises(UnsupportedError, match="a SlotCache"):
            getattr(model.cache, method)(1)
    metadata = PrefillMetadata.build(model.spec, num_slots=9, state_ids=[8], q_lens=[5], k_lens=[5])
    with pytest.raises(InvalidArgumentError, match="state_ids: got 8; allowed: -1 .padding. to 3"):
        model.prefill(ids[0], metadata, at[0])
    assert (model.cache.rings == 0xFF).all()
    with pytest.raises(InvalidArgumentError, match="tokens dtype"):
        prefill(_Halved(model), [(0, [1, 2], 2)])
    for wrong in ({"max_length": 0}, {"tokens_per_step": 0}, {"kv_format": "int3"}, {"num_slots": 0}):
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            slot_model(**wrong)


class _Halved:
    """Gives int32 tokens."""

    def __init__(self, model: TransformersSlotModel) -> None:
        self.model = model

    def __getattr__(self, name: str):  # noqa: ANN204
        return getattr(self.model, name)

    def prefill(self, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        return self.model.prefill(tokens.int(), *rest)  # type: ignore[arg-type]
