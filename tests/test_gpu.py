"""What only a GPU shows: the compiled kernels themselves, far offsets, graph replay, memory (`pytest -m gpu`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import (
    ATTENTION_ARGS,
    BY_NAME,
    CASES,
    EPS,
    FUSED_CASES,
    NORM_STORE_ARGS,
    STORE_ARGS,
    TURN_ARGS,
    Case,
    attention_op,
    cast_back_op,
    decode_inputs,
    filled_cache,
    judge,
    norm_inputs,
    norm_store_op,
    query_inputs,
    steps,
    store_op,
    vectors,
)
from numerics import assert_same, relative_error
from test_attention import exact
from torch._dynamo.utils import counters

import swa_inductor as swa
from swa_inductor.lowerings._inductor import cudagraph_recordings

pytestmark = pytest.mark.gpu
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def to_gpu(values: list) -> list:
    return [v.cuda() if isinstance(v, torch.Tensor) else v for v in values]


@every_case
@pytest.mark.parametrize("seed", [11, 12])
def test_store_bytes(case: Case, seed: int) -> None:
    x = decode_inputs(case, seed)
    args = to_gpu([x[n] for n in STORE_ARGS])
    torch._dynamo.reset()
    torch.compile(store_op(case), fullgraph=True)(*args)
    store_op(case)(*(x[n] for n in STORE_ARGS))
    assert_same(args[2].cpu(), x["cache"])


def assert_same_but_for_ties(case: Case, value: torch.Tensor, want: torch.Tensor) -> None:
    """The device fuses multiplications and additions and takes roots in its own way: rare ties round otherwise."""
    assert value.shape == want.shape and value.dtype == want.dtype
    if value.dtype == torch.uint8 and case.spec.kv_format == "fp32":
        value, want = value.view(torch.float32), want.view(torch.float32)
    if value.dtype == torch.uint8:
        assert (value != want).float().mean() < 1e-3
    elif value.dtype == torch.float32 and case.spec.kv_format == "fp32":
        assert relative_error(value, want) < 1e-6
    else:
        assert relative_error(value, want) < 2e-3


@every_case
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_norm_and_rope_in_stores(case: Case, interleaved: bool) -> None:
    x = norm_inputs(case, decode_inputs(case), width=1280)
    for make, names in ((store_op, TURN_ARGS), (cast_back_op, TURN_ARGS), (norm_store_op, NORM_STORE_ARGS)):
        op, where = make(case, EPS, interleaved), names.index("cache")
        args = [x["cache"].clone() if n == "cache" else x[n] for n in names]
        on_gpu = to_gpu(args)
        want = op(*args)
        torch._dynamo.reset()
        got = torch.compile(op, fullgraph=True)(*on_gpu)
        assert not torch.equal(args[where], x["cache"])
        assert_same_but_for_ties(case, on_gpu[where].cpu(), args[where])
        for value, expected in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
            if expected is not None:
                assert_same_but_for_ties(case, value.cpu(), expected)


@pytest.mark.parametrize("case", CASES + FUSED_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("seed", [11, 12])
def test_attention(case: Case, seed: int) -> None:
    x = decode_inputs(case, seed)
    torch._dynamo.reset()
    compiled = torch.compile(attention_op(case), fullgraph=True)
    out, lse = compiled(*to_gpu([x[n] for n in ATTENTION_ARGS]))
    assert judge(case, x, (out.cpu(), lse.cpu()), exact) > 0


@pytest.mark.parametrize("name", ["v4", "gpt-oss", "mimo", "narrow-v", "v4+", "gpt-oss+"])
def test_poison(name: str) -> None:
    """Rows outside every window hold NaN codes: bit-equal outputs."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    visible = torch.zeros(case.slots, case.spec.rows, dtype=torch.bool)
    for t in range(len(x["positions"])):
        start = 0 if x["valid_start"] is None else int(x["valid_start"][t])
        if x["state_ids"][t] >= 0:
            lo, n = case.spec.visible(int(x["positions"][t]), start)
            visible[x["state_ids"][t], torch.arange(lo, lo + n) % case.spec.rows] = True
    torch._dynamo.reset()
    compiled = torch.compile(attention_op(case), fullgraph=True)
    clean = compiled(*to_gpu([x[n] for n in ATTENTION_ARGS]))
    x["cache"] = torch.where(visible[..., None, None], x["cache"], 0x7F)
    x["q"][x["state_ids"] < 0] = torch.nan
    for value, was in zip(compiled(*to_gpu([x[n] for n in ATTENTION_ARGS])), clean, strict=True):
        assert_same(value, was)


def test_slots_beyond_two_gigabytes() -> None:
    """A17: state 1517 is the last whose start is below 2^31 bytes, state 1518 starts above."""
    case = BY_NAME["v4"]
    spec = case.spec
    stride = 20 * spec.ring_bytes
    state = torch.full((1519, stride), 0x7F, dtype=torch.uint8, device="cuda")
    cache = state[:, :70_752].view(spec.cache_shape(1519))
    k, _, q = (None if t is None else t.cuda() for t in vectors(case, 12))
    ids = torch.tensor([1517] * 6 + [1518] * 6, dtype=torch.int32, device="cuda")
    at = torch.arange(6, device="cuda").repeat(2)

    def fn(k: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        swa.store(k, None, cache, ids, at, spec=spec)
        return swa.attention(q, cache, ids, at, spec=spec, tokens_per_step=6)

    torch._dynamo.reset()
    out = torch.compile(fn, fullgraph=True)(k, q, cache, ids, at)
    small = torch.zeros(spec.cache_shape(2), dtype=torch.uint8)
    want = fn(k.cpu(), q.cpu(), small, (ids - 1517).cpu(), at.cpu())
    assert_same(cache[1517:, :6].cpu(), small[:, :6])
    torch.testing.assert_close(out.cpu(), want, rtol=2e-2, atol=2e-2)
    assert (state[:1517] == 0x7F).all() and (cache[1517:, 6:] == 0x7F).all() and (state[1517:, 70_752:] == 0x7F).all()


class Layer(torch.nn.Module):
    """A ring as a module buffer: what a user writes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.register_buffer("cache", torch.zeros(case.spec.cache_shape(case.slots), dtype=torch.uint8))

    def forward(self, k: torch.Tensor, v: torch.Tensor | None, q: torch.Tensor, *meta: torch.Tensor) -> torch.Tensor:
        store_op(self.case)(k * 2, v, self.cache, *meta)
        return attention_op(self.case, return_lse=False)(q, self.cache, *meta, None, None) + 1


@pytest.mark.parametrize("name", ["v4", "gpt-oss"])
def test_a_decode_loop_is_one_recorded_graph(name: str) -> None:
    """D1, D2, D5: slots, positions and padding change at every replay; recorded once, exact, nothing allocated."""
    case = BY_NAME[name]
    d = case.spec.tokens_per_step
    eager, layer = Layer(case), Layer(case).cuda()
    torch._dynamo.reset()
    counters.clear()
    recorded = cudagraph_recordings()
    step = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    pointer = layer.cache.data_ptr()
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 300, (case.slots,), generator=g)
    peak = 0
    for i in range(24):
        slots = torch.randperm(case.slots, generator=g)[:3]
        slots[2] = slots[2] if i % 3 else -1
        ids = slots.int().repeat_interleave(d)
        at = (lengths[slots.clamp(min=0)][:, None] + torch.arange(d)).flatten()
        at = torch.where(ids >= 0, at, -1)
        k, v, q = vectors(case, 3 * d, seed=i)
        torch.compiler.cudagraph_mark_step_begin()
        out = step(*to_gpu([k, v, q, ids, at])).cpu()
        want = eager(k, v, q, ids, at)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        assert_same(layer.cache.cpu(), eager.cache)
        lengths[slots[slots >= 0]] += torch.randint(1, d + 1, (int((slots >= 0).sum()),), generator=g)
        if i == 12:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            peak = torch.cuda.max_memory_allocated()
    assert torch.cuda.max_memory_allocated() - peak < (1 << 20)
    assert cudagraph_recordings() - recorded == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert layer.cache.data_ptr() == pointer


def test_many_sequences_of_v4() -> None:
    """128 rows a program, the number of tokens unknown, against the reference on the CPU."""
    case = replace(BY_NAME["v4+"], slots=12)
    d, w = case.spec.tokens_per_step, case.spec.window
    cache, sinks = filled_cache(case), torch.randn(case.heads)
    torch._dynamo.reset()
    compiled = torch.compile(attention_op(case), fullgraph=True, dynamic=True)
    for sequences in (12, 7, 40):
        slots = torch.arange(sequences) % 13 - 1
        ids, at = steps(case, [(37 * i) % (3 * w) for i in range(sequences)], slots.tolist())
        q = torch.randn(d * sequences, case.heads, 512).to(case.dtype)
        x = {"q": q, "cache": cache, "state_ids": ids, "positions": at, "valid_start": None, "sinks": sinks}
        x |= query_inputs(case, at, 0)
        out, lse = compiled(*to_gpu([x[n] for n in ATTENTION_ARGS]))
        assert judge(case, x, (out.cpu(), lse.cpu()), exact) > 0


def test_graphs_of_transformers_models() -> None:
    """A compiled decode step over RingCache: one recording for 40 steps that wrap the rings, tokens equal to eager."""
    transformers = pytest.importorskip("transformers")
    from swa_inductor.integrations.transformers import RingCache, cache_kwarg

    config = transformers.Gemma3TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=16,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).cuda().eval()
    name = cache_kwarg(model)
    prompt = torch.randint(0, 256, (2, 40), device="cuda")

    def generate(step, cache) -> torch.Tensor:  # noqa: ANN001
        cache.reset()
        with torch.no_grad():
            token = model(prompt, **{name: cache}).logits[:, -1:].argmax(-1)
            tokens = [token]
            for _ in range(40):
                torch.compiler.cudagraph_mark_step_begin()
                token = step(token).clone()
                tokens.append(token)
        return torch.cat(tokens, 1)

    cache = RingCache.from_model(model, batch_size=2, max_length=128)

    def step(token: torch.Tensor) -> torch.Tensor:
        return model(token, **{name: cache}).logits[:, -1:].argmax(-1)

    want = generate(step, cache)
    torch._dynamo.reset()
    recorded = cudagraph_recordings()
    got = generate(torch.compile(step, fullgraph=True, mode="reduce-overhead"), cache)
    assert torch.equal(got, want)
    assert cudagraph_recordings() - recorded == 1


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3"])
def test_max_autotune(name: str) -> None:
    """Whatever tiles are fastest, the result is right; and what was timed leaves the shared counters as zeros."""
    case = BY_NAME[name]
    x = decode_inputs(case)
    args = to_gpu([x[n] for n in ATTENTION_ARGS])
    torch._dynamo.reset()
    step = torch.compile(attention_op(case), fullgraph=True, mode="max-autotune-no-cudagraphs")
    for _ in range(3):
        assert judge(case, x, tuple(t.cpu() for t in step(*args)), exact) > 0
