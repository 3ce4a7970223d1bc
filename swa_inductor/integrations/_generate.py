"""`use_rings`: `model.generate` with rings and nothing else to change, until it is taken back."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMode
from transformers.masking_utils import create_masks_for_generate

from swa_inductor.errors import InvalidArgumentError, UnsupportedError, require
from swa_inductor.integrations._cache import RingCache
from swa_inductor.integrations._draft_steps import DraftSteps
from swa_inductor.integrations._layers import cache_kwarg, plan_model, switch, use_stock
from swa_inductor.integrations._mask import IMPLEMENTATION, made_once

DRAFTED_TOKENS = 31
"""Drafts of an assistant in a step, at most: it keeps their number, 20 by default, to itself."""

_HOOK = "_prepare_cache_for_generation"
"""Method of transformers' models, 5.17 to 5.x at least, in which `generate` makes its cache."""

_MASKS = "create_masks_for_generate"
"""Method that some models have, and the function that `generate` calls for the others, before each forward."""


@dataclass
class _Call:
    """A call of `generate` that runs: the cache that was made for it, and the one whose steps are compiled here."""

    made: RingCache | None = None
    drafting: RingCache | None = None


class Rings:
    """What `use_rings` has switched over; `remove`, or the end of a `with` block, switches it back."""

    def __init__(self, model: PreTrainedModel, max_length: int | None, tokens_per_step: int, kv_format: str) -> None:
        if not hasattr(type(model), _HOOK):
            raise UnsupportedError(f"{type(model).__name__} has no {_HOOK}: not a model that generates")
        if _HOOK in vars(model):
            raise InvalidArgumentError("model: got one with rings; allowed: one without, call remove() first")
        # Refuse now what no cache could serve.
        plan_model(model, 1 if max_length is None else max_length, tokens_per_step, kv_format)
        self.model, self.max_length = model, max_length
        self.tokens_per_step, self.kv_format = tokens_per_step, kv_format
        switch(model, IMPLEMENTATION)
        self._spare: list[RingCache] = []  # one at most, which nobody uses
        self._calls: dict[int, _Call] = {}  # by thread, the innermost one
        self._steps = DraftSteps(model)
        self._active = True
        vars(model).update({"generate": self._generate, _HOOK: self._prepare_cache, _MASKS: self._make_masks})

    def remove(self) -> None:
        """Switch the model back to stock, which can use no cache that `generate` has returned. Twice is no harm."""
        if self._active:
            self._active = False
            self._spare.clear()
            for name in ("generate", _HOOK, _MASKS):
                del vars(self.model)[name]
            use_stock(self.model)

    def __enter__(self) -> Rings:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `generate`, which takes the last column for the last token: moves padding behind it away."""
        ids: Any = kwargs.get("input_ids") if inputs is None else inputs
        mask: Any = kwargs.get("attention_mask")
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        start = int(cache.get_seq_length()) if isinstance(cache, RingCache) else 0
        if not (_is_2d(ids) and _is_2d(mask)) or ids.shape[1] + start < mask.shape[1]:
            return self._run(inputs, *args, **kwargs)
        stored = ids.shape[1] + start - mask.shape[1]  # columns of ids, which may leave the stored ones out
        new = mask[:, start:].bool()
        if not (new[:, :-1] & ~new[:, 1:]).any():
            return self._run(inputs, *args, **kwargs)
        for name, value in kwargs.items():
            if name not in ("input_ids", "attention_mask") and isinstance(value, Tensor):
                if value.shape[:2] in (ids.shape, mask.shape):
                    raise UnsupportedError(f"{name} with a prompt that is padded on the right: pad it on the left")
        order = torch.argsort(new.int(), dim=1, stable=True)
        moved = torch.cat([ids[:, :stored], ids[:, stored:].gather(1, order)], 1)
        kwargs["attention_mask"] = torch.cat([mask[:, :start], mask[:, start:].gather(1, order)], 1)
        if inputs is None:
            kwargs["input_ids"] = moved
        out = self._run(None if inputs is None else moved, *args, **kwargs)
        sequences = out if isinstance(out, Tensor) else out.sequences
        sequences[:, : ids.shape[1]] = ids.repeat_interleave(len(sequences) // len(ids), 0)
        return out

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Stock `generate`. Reuses a cache that it does not return: CUDA graphs need rings to stay where they are."""
        thread = threading.get_ident()
        outer, call = self._calls.get(thread), _Call()
        self._calls[thread] = call
        try:
            out = type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            if call.drafting is not None:
                self._steps.end(call.drafting)
            if outer is None:
                del self._calls[thread]
            else:
                self._calls[thread] = outer
        if call.made is not None and isinstance(out, Tensor) and self._active:
            self._spare[:] = [call.made]
        return out

    def _prepare_cache(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Stands in for the method of the model: puts a RingCache into `model_kwargs`, unless there is a cache."""
        config, name = generation_config, cache_kwarg(self.model)
        mask: Any = model_kwargs.get("attention_mask")
        if _is_2d(mask) and not mask[:, -1].all():
            raise InvalidArgumentError(
                "attention_mask: got padding on the right of ids without a mask; allowed: on the left, or a mask"
            )
        require(
            config.cache_implementation is None,
            "cache_implementation",
            repr(config.cache_implementation),
            "None: use_rings brings the cache",
        )
        if config.assistant_early_exit is not None:
            raise UnsupportedError("assistant_early_exit: a cache of rings has all layers of its model")
        drafting = config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION
        drafted = config.prompt_lookup_num_tokens or (DRAFTED_TOKENS if drafting else 0)
        tokens_per_step = max(self.tokens_per_step, drafted + 1)
        call = self._calls[threading.get_ident()]
        if model_kwargs.get(name) is not None or config.use_cache is False:
            stock = getattr(type(self.model), _HOOK)
            stock(self.model, config, model_kwargs, generation_mode, batch_size, max_cache_length)
        else:
            cache: Any = self._cache(
                batch_size * max(config.num_beams, config.num_return_sequences),
                max(max_cache_length + 1, self.max_length or 0) + tokens_per_step - 1,  # the last drafts go beyond
                tokens_per_step,
            )
            if config.is_assistant and self.max_length is None and cache.state.limit is not None:
                allowed = "a number, as an assistant has full attention"
                raise InvalidArgumentError(f"max_length: got None; allowed: {allowed}")
            call.made = model_kwargs[name] = cache
        cache = model_kwargs.get(name)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and isinstance(cache, RingCache):
            self._compile_steps(call, cache, config, model_kwargs)

    def _make_masks(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for what makes the masks of a forward, on the host and for each type of layer."""
        of_class: Any = inspect.getattr_static(type(self.model), _MASKS, None)  # static in most models, not in all
        make = create_masks_for_generate if of_class is None else of_class.__get__(self.model)
        with made_once():
            return make(*args, **kwargs)

    def _compile_steps(self, call: _Call, cache: RingCache, config: GenerationConfig, model_kwargs: Any) -> None:
        """Where `generate` would compile its steps, compile them here, for any number of drafts at once."""
        model: Any = self.model
        if model._valid_auto_compile_criteria(model_kwargs, config):
            self._steps.begin(cache, config.compile_config or model._default_compile_config())
            config.disable_compile, call.drafting = True, cache

    def _cache(self, batch_size: int, max_length: int, tokens_per_step: int) -> RingCache:
        """An empty cache, the spare one if it will do."""
        cache = self._spare.pop() if self._spare else None
        if (
            cache is None
            or cache.batch_size != batch_size
            or cache.state.shortest.tokens_per_step != tokens_per_step
            or (cache.state.limit is not None and cache.state.limit < max_length)
        ):
            return RingCache.from_model(
                self.model,
                batch_size=batch_size,
                max_length=max_length,
                tokens_per_step=tokens_per_step,
                kv_format=self.kv_format,
            )
        cache.reset()
        return cache


def _is_2d(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


def use_rings(
    model: PreTrainedModel,
    *,
    max_length: int | None = None,
    tokens_per_step: int = 1,
    kv_format: str = "auto",
) -> Rings:
    """Let `model.generate` keep its keys and values in rings: from now on it makes a RingCache for every call.

    Greedy, sampled and beam search, prompts padded on the left or on the right, prompt lookup, an assistant model and
    chunked prefill give what stock attention gives. With `return_dict_in_generate` the output holds the cache, with
    which a further call goes on. Without one, a later call of the same batch size uses the same memory again. A forward
    of your own needs a RingCache.

    Args:
        model: a decoder of sliding and full attention layers, on one device.
        max_length: tokens a sequence may grow to in the full-attention layers, where a call asks for fewer: for a cache
            that further calls go on with. Default: what the call asks for.
        tokens_per_step: see `RingCache.from_model`. Where a call drafts, at least one more than its drafts is taken, 32
            with an assistant model.
        kv_format: record format; 'auto' is that of the model's dtype.

    Returns:
        A handle: its `remove()` switches the model back, as does the end of a `with` block around it.

    Raises:
        UnsupportedError: a layer type or model that rings cannot serve; the message names the layer and why.
        InvalidArgumentError: an argument out of range, or a model with rings.
    """
    return Rings(model, max_length, tokens_per_step, kv_format)
