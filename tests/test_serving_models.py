"""SmallModel: its rings against its own forward without rings, whatever the chunks, the batch and the format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from serving_runs import (
    one_thread,  # noqa: F401  a fixture
    prefill,
    prompt,
    tiny_model,
)

import swa_inductor as swa
from swa_inductor.serving import SlotModel, SmallModel


@torch.no_grad()
def decode(model: SmallModel, rows: list[tuple[int, list[int], int]]) -> torch.Tensor:
    """Logits [T, V] of the last `new` tokens of each (slot, tokens, new), in D rows each; slot -1 for padding."""
    depth = model.spec.tokens_per_step
    flat: list[tuple[int, int, int]] = []  # slot, token, position
    for slot, tokens, new in rows:
        flat += [(slot, tokens[p], p) for p in range(len(tokens) - new, len(tokens))]
        flat += [(-1, 0, 0)] * (depth - new)
    slots, tokens, at = (list(column) for column in zip(*flat, strict=True))
    device = model.device
    metadata = swa.DecodeMetadata.build(
        model.spec, num_slots=model.num_slots, state_ids=slots, positions=at, device=device
    )
    return model.decode(torch.tensor(tokens, device=device), metadata)


@pytest.mark.parametrize("changes", [{}, {"layers": 2, "sinks": False}, {"kv_format": "mxfp8"}, {"kv_format": "bf16"}])
def test_logits_are_those_without_rings(changes: dict) -> None:
    """A7, D8: two sequences at different offsets in one prefill, then decode rows; other ring rows are NaN codes."""
    model = tiny_model(**changes)
    long, short = prompt(60), prompt(9, seed=1)
    want_long, want_short = model.reference_logits(long), model.reference_logits(short)
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(prefill(model, [(3, long[:25], 25)])[0], want_long[24], **close)
    mixed = prefill(model, [(1, short[:5], 5), (3, long[:48], 23)], padding=3)
    torch.testing.assert_close(mixed, torch.stack([want_short[4], want_long[47]]), **close)
    decode(model, [(3, [*long[:49], 0, 0, 0], 4)])  # drafts, the last three rejected
    for tokens, new in (51, 2), (55, 4), (58, 3):
        rows = decode(model, [(-1, [0], 0), (3, long[:tokens], new), (1, short, 4)])
        assert rows.isfinite().all()
        torch.testing.assert_close(rows[4 : 4 + new], want_long[tokens - new : tokens], **close)
        torch.testing.assert_close(rows[8:], want_short[5:], **close)


def test_the_window_is_seen_and_no_more() -> None:
    """A3: of one layer, the logits of a token depend on the W - 1 tokens before it."""
    model, tokens = tiny_model(), prompt(40)
    for distance, depends in ((15, True), (16, False)):
        other = list(tokens)
        other[39 - distance] = (tokens[39 - distance] + 1) % model.vocab_size
        assert torch.equal(model.reference_logits(tokens)[39], model.reference_logits(other)[39]) != depends


def test_padding_writes_nothing_and_is_finite() -> None:
    """D7: 3 live rows and 5 padded ones: the live ones as in a batch of 3, the padded ones finite; no foreign byte."""
    model, alone = (tiny_model(tokens_per_step=1, num_slots=8) for _ in range(2))
    sequences = [prompt(20 + i, seed=i) for i in range(3)]
    for m in (model, alone):
        prefill(m, [(slot, tokens[:-1], len(tokens) - 1) for slot, tokens in enumerate(sequences)])
    before = model.state.clone()
    rows = decode(model, [(slot, tokens, 1) for slot, tokens in enumerate(sequences)] + [(-1, [0], 0)] * 5)
    three = decode(alone, [(slot, tokens, 1) for slot, tokens in enumerate(sequences)])
    torch.testing.assert_close(rows[:3], three, rtol=0, atol=1e-9)
    assert rows.isfinite().all()
    assert torch.equal(model.state[3:], before[3:]) and not torch.equal(model.state[:3], before[:3])


def plain(fn: Callable) -> Callable:
    return fn


def traced(fn: Callable) -> Callable:
    return torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.parametrize("wrap", [plain, traced])
@pytest.mark.parametrize("path", ["decode", "verify", "extend", "prefill"])
def test_every_path_uses_the_rings(path: str, wrap: Callable) -> None:
    """D13: decode, verification of drafts, extension by a few tokens, prefill: right, and only in rows of its slot."""
    torch._dynamo.reset()
    model = tiny_model(tokens_per_step=1 if path == "decode" else 4)
    model.decode, model.prefill = wrap(model.decode), wrap(model.prefill)  # type: ignore[method-assign]
    new = {"decode": 1, "verify": 4, "extend": 3, "prefill": 30}[path]
    tokens = prompt(30 + new)
    prefill(model, [(2, tokens[:30], 30)])
    before = model.state.clone()
    step = decode if path in ("decode", "verify") else prefill
    logits = step(model, [(2, tokens, new)])
    torch.testing.assert_close(logits[-1], model.reference_logits(tokens)[-1], rtol=0, atol=1e-4)
    rows = (model.state != before).view(5, model.spec.rows, -1).any(-1)
    written = {p % model.spec.rows for p in range(30, 30 + new)}
    assert not rows[[0, 1, 3, 4]].any() and set(rows[2].nonzero().flatten().tolist()) == written


def test_bytes() -> None:
    model: SlotModel = tiny_model(layers=2, window=128, tokens_per_step=6, kv_format="bf16")
    assert model.state_bytes == 5 * 2 * 134 * 2 * (2 * 32 * 2) == sum(b.numel() for b in model.buffers())  # type: ignore[attr-defined]
    assert model.full_kv_bytes(1000) == 1000 * 2 * 2 * (2 * 32 * 2)


def test_weights_depend_on_the_seed_alone() -> None:
    a, b, c = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    tokens = prompt(5)
    assert torch.equal(a.reference_logits(tokens), b.reference_logits(tokens))
    assert not torch.equal(a.reference_logits(tokens), c.reference_logits(tokens))
