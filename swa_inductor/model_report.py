"""`swa-inductor explain`: the rings that a transformers model would have, layer by layer, from its config alone."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from swa_inductor._environment import CannotRun
from swa_inductor._layer_kernels import SEQUENCES, layer_kernels
from swa_inductor.errors import UnsupportedError
from swa_inductor.explanation import Explanation
from swa_inductor.spec import RingSpec
from swa_inductor.state import StateLayout


@dataclass(frozen=True)
class LayerReport:
    """One layer. Of a refused one there is only the reason.

    Attributes:
        index: from 0.
        type: 'sliding', 'full' or 'refused'.
        reason: why it is refused; empty otherwise.
        window: tokens that a query sees at most, itself included.
        num_kv_heads, head_dim, v_head_dim: of its records; v_head_dim None where K is V.
        rows: rows of the ring.
        record_bytes: of one token and KV head.
        ring_bytes: of the ring of one sequence.
        full_bytes: of a cache of `max_length` tokens in the same format.
    """

    index: int
    type: str
    reason: str = ""
    window: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    rows: int = 0
    record_bytes: int = 0
    ring_bytes: int = 0
    full_bytes: int = 0


@dataclass(frozen=True)
class ModelReport:
    """A model.

    Attributes:
        model, model_type: what was asked for, and its architecture.
        kv_format, tokens_per_step, max_length: what the rings were planned for.
        layers: empty where the model is refused as a whole.
        refused: why rings cannot serve the model, or parts of it; empty where they can.
        slot_bytes: rings of all layers that are served, of one sequence, as they lie in a state slot.
        full_bytes: caches of `max_length` tokens for the same layers.
        kernels: what a GPU launches for the first sliding layer in a decode step; None where that is not known.
        no_kernels: why it is not known; empty where it is, was not asked for, or there is no such layer.
    """

    model: str
    model_type: str
    kv_format: str
    tokens_per_step: int
    max_length: int
    layers: list[LayerReport]
    refused: list[str]
    slot_bytes: int
    full_bytes: int
    kernels: Explanation | None = None
    no_kernels: str = ""


def examine(
    model: str,
    kv_format: str = "auto",
    tokens_per_step: int = 1,
    max_length: int | None = None,
    kernels: bool = True,
) -> ModelReport:
    """Plan the rings of a model of which only the config is read.

    Args:
        model: directory or id on the Hugging Face Hub.
        kv_format: record format; 'auto' is that of the model's dtype.
        tokens_per_step: new tokens of a sequence in a decode step (D).
        max_length: tokens of a sequence at most; default: max_position_embeddings of the config.
        kernels: also compile a sliding layer, for a GPU that need not be there.

    Raises:
        CannotRun: no such model, no transformers, or nothing says how long a sequence may be.
        InvalidArgumentError: an option that does not fit the model.
    """
    meta = _on_meta(model)
    from swa_inductor.integrations._geometry import LayerPlan, examine_layers
    from swa_inductor.integrations._layers import record_format

    config = meta.config.get_text_config(decoder=True)
    max_length = max_length or getattr(config, "max_position_embeddings", None)
    if max_length is None:
        raise CannotRun(f"the config of {model} does not say how long a sequence may be: give --max-length")
    kv_format = record_format(meta, kv_format)
    layers: list[LayerReport] = []
    specs: list[RingSpec] = []
    refused: list[str] = []
    try:
        for index, plan in enumerate(examine_layers(meta, max_length, tokens_per_step, kv_format)):
            if isinstance(plan, LayerPlan):
                specs.append(plan.spec)
                layers.append(_served(index, plan.sliding, plan.spec, max_length))
            else:
                refused.append(str(plan))
                layers.append(LayerReport(index, "refused", str(plan)))
    except UnsupportedError as error:  # of the model as a whole
        refused.append(str(error))
    explanation, why_not = None, ""
    sliding = next((layer.index for layer in layers if layer.type == "sliding"), None)
    if kernels and sliding is not None and not refused:
        try:
            explanation = layer_kernels(
                meta, sliding, max_length=max_length, tokens_per_step=tokens_per_step, kv_format=kv_format
            )
        except Exception as error:  # the code of the model does not compile in one piece, or nothing compiles here
            why_not = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return ModelReport(
        model,
        config.model_type,
        kv_format,
        tokens_per_step,
        max_length,
        layers,
        refused,
        StateLayout(specs).slot_bytes if specs else 0,
        sum(layer.full_bytes for layer in layers),
        explanation,
        why_not,
    )


def _served(index: int, sliding: bool, spec: RingSpec, max_length: int) -> LayerReport:
    return LayerReport(
        index,
        "sliding" if sliding else "full",
        "",
        spec.window,
        spec.num_kv_heads,
        spec.head_dim,
        spec.v_head_dim,
        spec.rows,
        spec.record_bytes,
        spec.ring_bytes,
        max_length * spec.num_kv_heads * spec.record_bytes,
    )


def _on_meta(model: str) -> Any:
    """The model without weights."""
    if importlib.util.find_spec("transformers") is None:
        raise CannotRun("not installed: transformers. Install the extra: pip install 'swa-inductor[cli]'")
    local = Path(model).exists()
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=local, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of no common class: for what is no model, and for configs that make none
        raise CannotRun(f"transformers makes no model of {model}: {type(error).__name__}: {error}") from None


def table(report: ModelReport) -> Table:
    """A row per layer, and the totals."""
    title = f"{report.model_type}, tokens per step: {report.tokens_per_step}, records in {report.kv_format}"
    result = Table("layer", "type", title=title, title_justify="left")
    for name in (
        "window",
        "KV heads",
        "dims of K, V",
        "ring rows",
        "bytes a record",
        "bytes a sequence",
        "full length",
    ):
        result.add_column(name, justify="right")
    for layer in report.layers:
        if layer.type == "refused":
            result.add_row(str(layer.index), "refused")
            continue
        dims = f"{layer.head_dim}, {'K is V' if layer.v_head_dim is None else layer.v_head_dim}"
        sizes = layer.rows, layer.record_bytes, layer.ring_bytes, layer.full_bytes
        numbers = f"{layer.window:,}", str(layer.num_kv_heads), dims, *(f"{size:,}" for size in sizes)
        result.add_row(str(layer.index), layer.type, *numbers)
    result.add_section()
    total = f"{report.slot_bytes:,}", f"{report.full_bytes:,}"
    result.add_row("all", f"at {report.max_length:,} tokens", "", "", "", "", "", *total)
    return result


def kernels_text(report: ModelReport) -> str:
    """The kernels of a decode step, or why they are not known; empty where there is nothing to say."""
    if report.no_kernels:
        return f"The kernels of a decode step are not known: {report.no_kernels}"
    if report.kernels is None:
        return ""
    index = next(layer.index for layer in report.layers if layer.type == "sliding")
    return f"A decode step of {SEQUENCES} sequences in layer {index}, as compiled for a GPU:\n\n{report.kernels}"
