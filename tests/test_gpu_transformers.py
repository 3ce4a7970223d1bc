"""`model.generate` with rings on a GPU, where transformers compiles the steps by itself."""

from __future__ import annotations

import pytest
import torch

from swa_inductor.lowerings._inductor import cudagraph_recordings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v4"])
def test_generate_with_rings_is_one_graph(name: str) -> None:
    """One recording for two calls; greedy tokens of stock eager attention in fp32."""
    ring_models = pytest.importorskip("ring_models")
    from swa_inductor.integrations.transformers import use_rings

    model = ring_models.make_model(name, layers=2).cuda()
    ids = ring_models.prompt(2, 40).cuda()
    mask = torch.ones_like(ids)
    mask[1, :17] = ids[1, :17] = 0
    torch._dynamo.reset()
    recorded = cudagraph_recordings()
    with use_rings(model):
        runs = [model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60) for _ in range(2)]
    assert torch.equal(*runs)
    assert cudagraph_recordings() - recorded == 1
    for row, start in zip(runs[0], (0, 17), strict=True):
        logits = ring_models.stock_logits(model, row[None, start:])[0]
        assert torch.equal(row[40:], logits.argmax(-1)[39 - start : -1])


def test_steps_that_check_drafts_are_one_graph() -> None:
    """One recording for two calls, however many drafts a step has; fp32, the tokens of stock."""
    ring_models = pytest.importorskip("ring_models")
    from swa_inductor.integrations.transformers import use_rings

    model = ring_models.make_model("gemma3", layers=2).cuda()
    ids = ring_models.prompt(1, 20).repeat(1, 2).cuda()
    how = {"do_sample": False, "max_new_tokens": 60}
    want = model.generate(ids, **how)
    torch._dynamo.reset()
    recorded = cudagraph_recordings()
    with use_rings(model):
        for _ in range(2):
            assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **how), want)
    assert cudagraph_recordings() - recorded == 1
