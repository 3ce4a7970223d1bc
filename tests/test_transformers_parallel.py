"""Tensor parallelism of transformers models with rings: two processes against one, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from numerics import relative_error
from ring_models import decode, forward, make_cache, make_model, prompt
from test_sharding import RANKS, on_all_ranks
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import swa_inductor as swa
from swa_inductor.integrations.transformers import RingCache, parallelize, use_rings
from swa_inductor.lowerings._inductor import cudagraph_recordings

MODELS = {
    "gemma3": {},
    "gemma3, one KV head": {"num_key_value_heads": 1},
    "gpt_oss": {},
    "mimo_v2_flash": {},
    "mistral": {},
}


def model_of(name: str) -> torch.nn.Module:
    return make_model(name.split(",")[0], layers=2, **MODELS[name])


def run(model: torch.nn.Module, step: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of a prompt longer than the window and 20 steps."""
    cache = make_cache(model, batch_size=2, max_length=96)

    def plain(token: torch.Tensor) -> torch.Tensor:
        return forward(model, cache, token)

    first = forward(model, cache, prompt(2, 40))
    return decode(plain if step is None else step(plain), first, 20)


def check_models(mesh: DeviceMesh) -> None:
    for name in MODELS:
        whole = model_of(name)
        split = parallelize(copy.deepcopy(whole), mesh)
        cache = RingCache.from_model(split, batch_size=2, max_length=96)
        ours, theirs = (c.layers[0].spec.num_kv_heads for c in (cache, make_cache(whole, batch_size=2, max_length=96)))
        assert ours == (theirs if theirs == 1 else theirs // RANKS)
        (tokens, logits), (want, wanted) = run(split), run(whole)
        assert torch.equal(tokens, want), name
        assert relative_error(logits, wanted) < 1e-5, name


def check_compiled(mesh: DeviceMesh) -> None:
    """One compilation, and `generate` as it is."""
    whole = model_of("gemma3")
    split = parallelize(copy.deepcopy(whole), mesh)
    assert isinstance(split.model.layers[0].mlp.up_proj.weight, DTensor)
    with torch._dynamo.config.patch(error_on_recompile=True):
        tokens, _ = run(split, lambda fn: torch.compile(fn, fullgraph=True, backend="aot_eager"))
    assert torch.equal(tokens, run(whole)[0])
    how = {"do_sample": False, "max_new_tokens": 12, "use_cache": True}
    want = model_of("gemma3").generate(prompt(2, 30), **how)
    with use_rings(split):
        assert torch.equal(split.generate(prompt(2, 30), **how), want)


def test_models_on_two_ranks() -> None:
    """Tokens of one process; heads that several ranks share, one KV head, sinks, keys wider than values, experts."""
    on_all_ranks(check_models)


def check_refusals(mesh: DeviceMesh) -> None:
    for name, changes, error, message in (
        (
            "gemma3",
            {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
            swa.InvalidArgumentError,
            "the 3 query heads",
        ),
        (
            "gemma3",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            swa.InvalidArgumentError,
            "the 3 KV heads",
        ),
        ("phi3", {}, swa.UnsupportedError, "attention"),
        ("olmo3", {}, swa.UnsupportedError, "q_norm spans all heads"),
        ("deepseek_v4", {}, swa.UnsupportedError, "without q_proj, k_proj, v_proj, o_proj"),
    ):
        model = make_model(name, layers=1, **changes)
        with pytest.raises(error, match=message):
            parallelize(model, mesh)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = make_model("gemma3", layers=1)
    parallelize_module(model.model.layers[0].self_attn, mesh, {"k_proj": ColwiseParallel()})
    assert RingCache.from_model(model, batch_size=1, max_length=96).layers[0].spec.num_kv_heads == 1


def check_the_rest(mesh: DeviceMesh) -> None:
    check_compiled(mesh)
    check_refusals(mesh)


def test_a_compiled_model_on_two_ranks_and_what_is_refused() -> None:
    on_all_ranks(check_the_rest)


def check_on_gpus(mesh: DeviceMesh) -> None:
    whole = model_of("gpt_oss").cuda()
    split = parallelize(copy.deepcopy(whole), mesh)
    ids, how = prompt(2, 40).cuda(), {"do_sample": False, "max_new_tokens": 40}
    want = whole.generate(ids, **how)
    recorded = cudagraph_recordings()
    with use_rings(split):
        for _ in range(2):
            assert torch.equal(split.generate(ids, **how), want)
    assert cudagraph_recordings() - recorded == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
def test_a_model_on_two_gpus() -> None:
    """NCCL, fp32: tokens of one GPU, one recorded graph on each rank."""
    on_all_ranks(check_on_gpus, "nccl")
