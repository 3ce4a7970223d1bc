"""What a GPU would launch for a decoder layer of a transformers model in a decode step; takes no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swa_inductor.explanation import Explanation, explain
from swa_inductor.metadata import DecodeMetadata

SEQUENCES = 4


class _Reached(BaseException):
    """The layer has been called; not an Exception, so that the model's code leaves it alone."""


class _Layer(nn.Module):
    """A decoder layer and its cache; the tokens of the forward, which the cache keeps, are an argument."""

    def __init__(self, layer: nn.Module, cache: Any, names: list[str]) -> None:
        super().__init__()
        self.layer, self.cache, self.names = layer, cache, names
        self.register_buffer("rings", cache.rings)
        for index, of_layer in enumerate(cache.layers):
            self.register_buffer(f"ring_{index}", of_layer.ring)

    def forward(self, new_tokens: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.cache.state.tokens = new_tokens
        return self.layer(*args, **kwargs, **dict.fromkeys(self.names, self.cache))


def layer_kernels(model: Any, index: int, *, max_length: int, tokens_per_step: int, kv_format: str) -> Explanation:
    """Explain decoder layer `index` of a model on the meta device, whose attention is switched to rings for good.

    Raises:
        Exception: whatever the code of the model, or compiling it, raises.
    """
    from swa_inductor.integrations.transformers import TransformersSlotModel

    model.eval().requires_grad_(False)
    slots = TransformersSlotModel(
        model, num_slots=SEQUENCES, max_length=max_length, tokens_per_step=tokens_per_step, kv_format=kv_format
    )
    rows: list[int] = [slot for slot in range(SEQUENCES) for _ in range(tokens_per_step)]
    positions = list(range(tokens_per_step)) * SEQUENCES
    metadata = DecodeMetadata.build(
        slots.spec, num_slots=SEQUENCES, state_ids=rows, positions=positions, device=slots.device
    )
    layer: nn.Module = model.get_decoder().layers[index]
    call: dict[str, Any] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.update(args=args, kwargs=kwargs)
        raise _Reached

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    tokens: Tensor = torch.zeros(len(rows), dtype=torch.int64, device=slots.device)
    try:
        with torch.no_grad():
            slots.decode(tokens, metadata)
    except _Reached:
        pass
    finally:
        hook.remove()
    cache, state = slots.cache, slots.cache.state
    new_tokens, state.tokens = state.tokens, None
    names = [name for name, value in call["kwargs"].items() if value is cache]
    kwargs = {name: value for name, value in call["kwargs"].items() if value is not cache}
    return explain(_Layer(layer, cache, names), new_tokens, call["args"], kwargs)
