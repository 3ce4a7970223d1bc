"""`use_rings`: what `model.generate` gives is what it gives with stock eager attention."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable

import pytest
import torch
import transformers
from ring_models import (
    CONFIGS,
    WINDOW,
    make_cache,
    make_model,
    prompt,
    small_runs,  # noqa: F401  a fixture
    stock_logits,
)
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

from swa_inductor import InvalidArgumentError, UnsupportedError
from swa_inductor.integrations.transformers import RingCache, cache_kwarg, use_rings

GREEDY = {"do_sample": False, "max_new_tokens": 24}


def padded(lengths: tuple[int, ...], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths and their mask, [B, longest]."""
    ids = prompt(len(lengths), max(lengths))
    column = torch.arange(max(lengths)).expand_as(ids)
    mask = torch.stack([c >= len(c) - n if side == "left" else c < n for c, n in zip(column, lengths, strict=True)])
    return ids * mask, mask.long()


def assert_greedy(model, ids, mask, out) -> None:
    """The new tokens of every row are the greedy ones of stock eager attention over that row alone."""
    width = ids.shape[1]
    assert torch.equal(out[:, :width], ids)
    for row, real, tokens in zip(ids, mask.bool(), out[:, width:], strict=True):
        alone = torch.cat([row[real], tokens])[None]
        assert torch.equal(tokens, stock_logits(model, alone)[0, int(real.sum()) - 1 : -1].argmax(-1))


# ---------------------------------------------------------------------------------------------------- every model


class Counter(CompileCounterWithBackend):
    """One for all copies: transformers copies its compile config. `shapes`: of the inputs of all graphs."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.shapes: set[tuple] = set()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        self.shapes |= {tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor)}
        return super().__call__(gm, example_inputs)

    def __deepcopy__(self, memo: dict) -> Counter:
        return self


@pytest.mark.parametrize("name", CONFIGS)
def test_one_line_switches_a_model_over(name):
    """Prompts of different lengths, longer than the window, and 100 steps, in one graph."""
    model = make_model(name, layers=2)
    ids, mask = padded((40, 23), "left")
    counter = Counter("eager")
    compile_config = CompileConfig(backend=counter, fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # not on GPUs alone
    use_rings(model)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=101, compile_config=compile_config
    )  # the prefill chooses the first
    assert out.shape == (2, 141) and counter.frame_count == 1
    assert len(out[:, 40:].unique()) > 5  # not one token again and again, which any attention would give
    assert_greedy(model, ids, mask, out)


def test_models_that_transformers_lacks_are_skipped(monkeypatch):
    monkeypatch.setitem(CONFIGS, "nobody", ("NobodyConfig", {}))
    with pytest.raises(pytest.skip.Exception, match=rf"transformers {transformers.__version__} has no NobodyConfig"):
        make_model("nobody")


# ---------------------------------------------------------------------------------------------------- every way


def test_remove_and_with_block_switch_back():
    model, ids = make_model(), prompt(2, 30)
    want = model.generate(ids, **GREEDY)
    rings = use_rings(model)
    with pytest.raises(InvalidArgumentError, match="model: got one with rings"):
        use_rings(model)
    with pytest.raises(InvalidArgumentError, match="allowed: a RingCache"):  # a forward without a cache
        model(ids)
    assert torch.equal(copy.deepcopy(model).generate(ids, **GREEDY), want)
    rings.remove()
    assert model.config._attn_implementation == "eager"
    with contextlib.suppress(KeyError), use_rings(model):
        assert model.config._attn_implementation == "swa_ring"
        rings.remove()  # the second time: not what is not its own
        assert torch.equal(model.generate(ids, **GREEDY), want)
        raise KeyError
    assert not {"generate", "_prepare_cache_for_generation", "_swa_former_implementation"} & vars(model).keys()
    assert torch.equal(model.generate(ids, **GREEDY), want)
    assert torch.equal(model(ids).logits, stock_logits(model, ids))


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 7},
    ],
    ids=str,
)
def test_same_as_stock(how):
    model = make_model(layers=2)
    ids, mask = padded((40, 27), "left")
    options = {**GREEDY, "attention_mask": mask, **how}
    torch.manual_seed(3)
    want = model.generate(ids, **options)
    torch.manual_seed(3)
    with use_rings(model):
        assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("drafts", ["lookup", "assistant", "stock assistant"])
def test_drafts_are_rolled_back(drafts, monkeypatch):
    if drafts == "stock assistant" and transformers.__version__ < "5.24":
        pytest.skip("before 5.24 sliding layers of an assistant fail in stock transformers")
    model, assistant = make_model(), make_model(layers=2)
    assistant.generation_config.update(  # many drafts, however unsure it is of them
        num_assistant_tokens=20, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    ids = prompt(1, 20).repeat(1, 2)
    lengths = range(54, 61) if drafts == "lookup" else (60,)  # the last drafts may be beyond
    options = [{"do_sample": False, "max_new_tokens": n} for n in lengths]
    want = [model.generate(ids, **o) for o in options]
    removed, crop = [], RingCache.crop
    monkeypatch.setattr(RingCache, "crop", lambda cache, n: (removed.append(int(n)), crop(cache, n))[1])
    how = {"prompt_lookup_num_tokens": 3} if drafts == "lookup" else {"assistant_model": assistant}
    with use_rings(model), use_rings(assistant, max_length=100) if drafts == "assistant" else contextlib.nullcontext():
        assert all(torch.equal(model.generate(ids, **o, **how), w) for o, w in zip(options, want, strict=True))
    assert min(removed) < (-2 if drafts == "lookup" else -WINDOW)


@pytest.mark.parametrize(
    "drafts, name", [("lookup", "gemma3"), ("lookup", "gpt_oss"), ("lookup", "mistral"), ("assistant", "gemma3")]
)
def test_steps_that_check_drafts_are_compiled_once(drafts, name):
    """However many drafts there are: the code is that of the largest number, and the text that of stock."""
    model, assistant, counter = make_model(name, layers=2), make_model(name, layers=1), Counter("eager")
    ids, greedy = prompt(1, 20).repeat(1, 2), {"do_sample": False, "max_new_tokens": 60}
    want = model.generate(ids, **greedy)
    compile_config = CompileConfig(backend=counter, fullgraph=True, mode=None)
    compile_config._compile_all_devices = True
    how = {"prompt_lookup_num_tokens": 3} if drafts == "lookup" else {"assistant_model": assistant}
    with use_rings(model), use_rings(assistant, max_length=100):
        for _ in range(2):
            assert torch.equal(model.generate(ids, compile_config=compile_config, **greedy, **how), want)
    assert counter.frame_count == 1 and (1, 4 if drafts == "lookup" else 32) in counter.shapes
    assert "forward" not in vars(model)


def test_steps_of_which_more_than_logits_is_wanted_are_not_compiled():
    model, counter = make_model(), Counter("eager")
    compile_config = CompileConfig(backend=counter, mode=None)
    compile_config._compile_all_devices = True
    how = {"prompt_lookup_num_tokens": 3, "compile_config": compile_config}
    ids = prompt(1, 20).repeat(1, 2)
    want = model.generate(ids, **GREEDY)
    with use_rings(model):
        out = model.generate(ids, output_hidden_states=True, return_dict_in_generate=True, **how, **GREEDY)
        assert torch.equal(out.sequences, want) and out.hidden_states and counter.frame_count == 0
        assert torch.equal(model.generate(ids, **how, **GREEDY), want) and counter.frame_count == 1


def test_a_forward_of_ones_own_stays_in_place():
    """One that a library has set on the model is called for the steps, and is there again afterwards."""
    model, counter, calls = make_model(layers=2), Counter("eager"), []
    compile_config = CompileConfig(backend=counter, mode=None)
    compile_config._compile_all_devices = True
    ids, forward = prompt(1, 20).repeat(1, 2), model.forward

    @functools.wraps(forward)
    def own(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    model.forward = own
    want = model.generate(ids, **GREEDY)
    calls.clear()
    with use_rings(model):
        how = {"prompt_lookup_num_tokens": 3, "compile_config": compile_config, **GREEDY}
        assert torch.equal(model.generate(ids, **how), want) and calls and model.forward is own


def test_a_copy_of_a_model_compiles_its_own_steps():
    model, counter = make_model(layers=2), Counter("eager")
    compile_config = CompileConfig(backend=counter, mode=None)
    compile_config._compile_all_devices = True
    how = {"prompt_lookup_num_tokens": 3, "compile_config": compile_config, **GREEDY}
    ids = prompt(1, 20).repeat(1, 2)
    with use_rings(model):
        model.generate(ids, **how)
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.data.add_(torch.randn_like(p))
        want = other.generate(ids, **GREEDY)
        assert torch.equal(other.generate(ids, **how), want)  # not with the weights of the first
    assert not torch.equal(want, model.generate(ids, **GREEDY))


@pytest.mark.parametrize("given", ["inputs", "input_ids"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_padding_on_the_right(given, as_dict):
    """Stock would go on from the padding. The prompt comes back as it was."""
    model = make_model(layers=2)
    ids, mask = padded((40, 3, 27), "right")
    with use_rings(model):
        out = model.generate(**{given: ids}, attention_mask=mask, return_dict_in_generate=as_dict, **GREEDY)
        assert_greedy(model, ids, mask, out.sequences if as_dict else out)
        twice = model.generate(ids, attention_mask=mask, num_beams=2, num_return_sequences=2, **GREEDY)
    assert torch.equal(twice[:, :40], ids.repeat_interleave(2, 0))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_chat_goes_on_with_the_cache_of_the_output(side, whole):
    model = make_model(layers=2)
    ids, mask = padded((30, 17), side)
    with use_rings(model, max_length=150):
        out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
        other = model.generate(prompt(2, 35, seed=5), return_dict_in_generate=True, **GREEDY)  # in between
        cache = getattr(out, cache_kwarg(model))
        assert getattr(other, cache_kwarg(model)).layers[0].ring.data_ptr() != cache.layers[0].ring.data_ptr()
        new, new_mask = padded((20, 6), side)
        mask = torch.cat([mask, torch.ones(2, 24, dtype=torch.int64), new_mask], 1)
        ids = torch.cat([out.sequences, new], 1)
        shown = 0 if whole else 53  # the last token of the answer is not stored
        more = model.generate(ids[:, shown:], attention_mask=mask, **{cache_kwarg(model): cache}, **GREEDY)
    assert_greedy(model, ids, mask, torch.cat([ids[:, :shown], more], 1))


def test_a_ring_cache_of_ones_own_again_after_reset():
    model = make_model(layers=2)
    cache = make_cache(model, batch_size=2, max_length=80)
    ids, mask = padded((30, 9), "left")
    for _ in range(2):
        out = model.generate(ids, attention_mask=mask, **{cache_kwarg(model): cache}, **GREEDY)
        assert_greedy(model, ids, mask, out)
        cache.reset()


def test_rings_are_used_again(monkeypatch):
    """The same addresses, where nobody else holds them and they will do."""
    model, made = make_model(layers=2), []
    from_model = RingCache.from_model
    monkeypatch.setattr(
        RingCache, "from_model", lambda *args, **kwargs: made.append(kwargs) or from_model(*args, **kwargs)
    )
    with use_rings(model) as rings:
        for length, batch in ((30, 2), (20, 2), (30, 2), (31, 2), (31, 1)):
            ids = prompt(batch, length)
            assert_greedy(model, ids, torch.ones_like(ids), model.generate(ids, **GREEDY))
        assert [(m["batch_size"], m["max_length"], m["tokens_per_step"]) for m in made] == [
            (2, 54, 1),
            (2, 55, 1),
            (1, 55, 1),
        ]
        kept = model.generate(ids, return_dict_in_generate=True, **GREEDY)
        before = [layer.ring.clone() for layer in getattr(kept, cache_kwarg(model)).layers]
        model.generate(ids.flip(1), **GREEDY)
        after = [layer.ring for layer in getattr(kept, cache_kwarg(model)).layers]
        assert all(map(torch.equal, before, after)) and len(made) == 4
    assert not rings._spare


# ---------------------------------------------------------------------------------------------------- refusals


def test_what_generate_cannot_do_with_rings_is_refused():
    model = make_model(layers=2)
    ids, mask = padded((30, 17), "right")
    for wrong, error, message in (
        ({"cache_implementation": "static"}, InvalidArgumentError, "cache_implementation: got 'static'"),
        ({"assistant_early_exit": 1}, UnsupportedError, "assistant_early_exit"),
        ({"use_cache": False}, InvalidArgumentError, "allowed: a RingCache"),
        ({"assistant_model": model}, InvalidArgumentError, "max_length: got None.*assistant"),
    ):
        with use_rings(model), pytest.raises(error, match=message):
            model.generate(ids[:1], **wrong, **GREEDY)
    with use_rings(model):
        with pytest.raises(InvalidArgumentError, match="attention_mask: got padding on the right"):
            model.generate(ids, **GREEDY)  # told by the padding token
        with pytest.raises(UnsupportedError, match="position_ids with a prompt that is padded on the right"):
            model.generate(ids, attention_mask=mask, position_ids=mask.cumsum(1) - 1, **GREEDY)
        cache = make_cache(model, batch_size=1, max_length=99)
        with pytest.raises(InvalidArgumentError, match="tokens_to_remove.*a larger tokens_per_step allows more"):
            model.generate(
                prompt(1, 20).repeat(1, 2), prompt_lookup_num_tokens=8, **{cache_kwarg(model): cache}, **GREEDY
            )
        short = model.generate(ids[:1], return_dict_in_generate=True, **GREEDY)
        with pytest.raises(InvalidArgumentError, match="below max_length=54"):
            model.generate(short.sequences, **{cache_kwarg(model): getattr(short, cache_kwarg(model))}, **GREEDY)


def test_models_and_arguments_that_will_not_do_are_refused_at_once():
    model = make_model("deepseek_v4", layers=2, layer_types=["sliding_attention", "compressed_sparse_attention"])
    with pytest.raises(UnsupportedError, match="layer 1 is 'compressed_sparse_attention', whose compressed keys"):
        use_rings(model)
    with pytest.raises(UnsupportedError, match="Gemma3TextModel.*not a model that generates"):
        use_rings(make_model(layers=2).model)
    model = make_model(layers=2)
    for wrong in ({"max_length": 0}, {"tokens_per_step": 0}, {"kv_format": "int3"}):
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            use_rings(model, **wrong)
    assert model.config._attn_implementation == "eager" and "generate" not in vars(model)
