"""Steps of `generate` that check drafts, of which there are more or fewer: compiled for the most, and padded to it."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CompileConfig

from swa_inductor.integrations._cache import RingCache
from swa_inductor.integrations._layers import cache_kwarg

_ROWS = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "cache_position")
"""Inputs of a forward with a column for each new token, the last dim."""
_MORE_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class DraftSteps:
    """Stands in for the forward of a model while a call of `generate` drafts.

    A step of up to D tokens runs in code that is compiled once, for D tokens: to transformers every number of drafts is
    a shape of its own. Rows beyond the tokens are padding, which rings do not store. Any other forward, such as the
    prefill, or a step of which more than logits is wanted, is the model's own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._active: dict[int, Callable[..., Any]] = {}  # by id of the cache, the compiled forward
        self._compiled: tuple[Any, CompileConfig, Callable[..., Any]] | None = None
        self._former: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DraftSteps:
        """Of a copied model: with nothing compiled, which would be the original's."""
        return DraftSteps(copy.deepcopy(self._model, memo))

    def begin(self, cache: RingCache, config: CompileConfig) -> None:
        """Compile the steps over `cache` from now on."""
        with self._lock:
            if not self._active:
                self._former = vars(self._model).get("forward")  # of a hook, such as accelerate's
                stock = self._model.forward
                if self._compiled is None or self._compiled[:2] != (stock, config):
                    self._compiled = stock, config, torch.compile(stock, **config.to_dict())
                vars(self._model)["forward"] = self._instead_of(stock)
            assert self._compiled is not None
            self._active[id(cache)] = self._compiled[2]

    def end(self, cache: RingCache) -> None:
        """Undo `begin`."""
        with self._lock:
            del self._active[id(cache)]
            if not self._active:
                if self._former is None:
                    del vars(self._model)["forward"]
                else:
                    vars(self._model)["forward"] = self._former

    def _instead_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        name = cache_kwarg(self._model)

        @functools.wraps(stock)
        def forward(*args: Any, **inputs: Any) -> Any:
            cache: Any = inputs.get(name)
            compiled = self._active.get(id(cache))
            if args or compiled is None or not _is_step(inputs, cache.state.shortest.tokens_per_step):
                return stock(*args, **inputs)
            return _padded(compiled, cache, inputs)

        return forward


def _is_step(inputs: dict[str, Any], rows: int) -> bool:
    """Whether a forward can be padded to `rows` tokens: of its tensors it is known which have a column for a token."""
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)} - {"attention_mask"}
    return (
        "input_ids" in tensors
        and tensors <= set(_ROWS)
        and inputs["input_ids"].shape[1] <= rows
        and all(mask.dim() == 4 for mask in _masks(inputs).values())
        and isinstance(inputs.get("logits_to_keep", 0), int)
        and not any(inputs.get(name) for name in _MORE_OUTPUTS)
        and inputs.get("return_dict", True)
    )


def _masks(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The ring positions, for every type of layer, that `generate` prepares; a padding mask is no 4-D one."""
    mask = inputs.get("attention_mask")
    return mask if isinstance(mask, dict) else {"": mask if mask is not None else torch.empty(0)}


def _padded(compiled: Callable[..., Any], cache: RingCache, inputs: dict[str, Any]) -> Any:
    """A step of as many rows as the cache allows; its logits are those of the tokens alone."""
    new = inputs["input_ids"].shape[1]
    more = cache.state.shortest.tokens_per_step - new
    kept = inputs.get("logits_to_keep", 0) or new
    for name, value in inputs.items():
        if name in _ROWS and value is not None:
            inputs[name] = torch.cat([value, *[value[..., -1:]] * more], -1)
        elif name == "logits_to_keep":
            inputs[name] = 0  # all
    masks = {kind: torch.nn.functional.pad(mask, (0, more), value=-1) for kind, mask in _masks(inputs).items()}
    inputs["attention_mask"] = masks if isinstance(inputs["attention_mask"], dict) else masks[""]
    out = compiled(**inputs)
    cache.state.columns.sub_(more)
    out.logits = out.logits[:, new - kept : new].clone()  # a recorded graph writes its outputs anew
    return out
