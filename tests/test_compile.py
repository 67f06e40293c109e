"""The static latent cache compiles: `generate` traces one decode step as a whole graph and reuses it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import prompt
from transformers import CompileConfig


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_static_decode_step_is_one_graph(family, compressed):
    model = compressed(family, 0.5)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True  # transformers compiles on the CPU only when told to
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for tokens in (12, 15):  # two prompts into caches of one size: no second graph
        inputs = prompt(family, batch=2, tokens=tokens)
        options = {"max_new_tokens": 23 - tokens, "do_sample": False}
        ours = model.generate(**inputs, **options, cache_implementation="static", compile_config=config)
        assert torch.equal(ours, model.generate(**inputs, **options))
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]
