"""Nothing leaks between calls: threads, failures half-way, copies, compilation."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import prompt
from transformers import DynamicCache, StaticCache

from hf_wsvd import WSVDCache
from hf_wsvd.call import active_call
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.image_tokens import watch_image_tokens


def greedy(model, **options) -> torch.Tensor:
    return model.generate(max_new_tokens=8, do_sample=False, **options)


def test_threads_share_one_model(compressed):
    model = compressed("llama")
    prompts = [prompt("llama", batch=1 + seed % 2, tokens=5 + seed, seed=seed) for seed in range(8)]
    alone = [greedy(model, **inputs) for inputs in prompts]
    with ThreadPoolExecutor(max_workers=4) as pool:
        together = list(pool.map(lambda inputs: greedy(model, **inputs), prompts))
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_one_call_may_run_inside_another(compressed):
    outer, inner = compressed("llama"), compressed("qwen3")
    wanted, inner_wanted = greedy(outer, **prompt("llama")), greedy(inner, **prompt("qwen3"))
    results = []
    handle = outer.model.layers[1].mlp.register_forward_pre_hook(
        lambda *_: results.append(greedy(inner, **prompt("qwen3")))
    )
    try:
        assert torch.equal(greedy(outer, **prompt("llama")), wanted)
    finally:
        handle.remove()
    assert results
    assert all(torch.equal(result, inner_wanted) for result in results)


@pytest.mark.parametrize("where", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_failure_inside_attention_leaves_no_call_open(where, compressed):
    model = compressed("llama")
    wanted = greedy(model, **prompt("llama"))
    projection = getattr(model.model.layers[1].self_attn, where)

    def fail(*args):
        raise ZeroDivisionError

    for register in (projection.register_forward_pre_hook, projection.register_forward_hook):
        handle = register(fail)
        with pytest.raises(ZeroDivisionError):
            model(**prompt("llama"))
        handle.remove()
        assert active_call() is None
    assert torch.equal(greedy(model, **prompt("llama")), wanted)


def test_a_projection_used_on_its_own_leaves_no_trace(compressed):
    model = compressed("llama")
    wanted = greedy(model, **prompt("llama"))
    attention = model.model.layers[0].self_attn
    assert attention.k_proj(torch.randn(2, 3, 48)).shape == (2, 3, 32)
    assert torch.equal(greedy(model, **prompt("llama")), wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_copies_keep_their_own_caches(family, compressed):
    first, second = compressed(family), copy.deepcopy(compressed(family))
    ids = prompt(family)["input_ids"]
    caches = [WSVDCache(model) for model in (first, second)]
    for model, cache, tokens in zip((first, second), caches, (ids, ids[:, :5])):
        with torch.no_grad():
            model(input_ids=tokens, **{CACHE_ARGUMENT: cache})
    assert [cache.get_seq_length() for cache in caches] == [12, 5]


# The dense Mistral takes two graphs: static sliding layers of transformers hold their length as a Python integer.
@pytest.mark.parametrize(
    "family",
    ["llava", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama_mha", "qwen3"))],
)
@torch.no_grad()
def test_a_static_decode_step_compiles_whole_and_once(family, compressed, monkeypatch):
    model = compressed(family)
    if family == "llava":  # as for caches that keep images and text apart
        model = copy.deepcopy(model)
        watch_image_tokens(model)
        # As in a new process: what earlier tests left there would hide a second trace.
        module = sys.modules[watch_image_tokens.__module__]
        monkeypatch.setattr(module, "_traced", module._Slot())
    caches = [StaticCache(model.config.get_text_config(decoder=True), max_cache_len=24) for _ in range(2)]
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def step(token: torch.Tensor, position: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        return model(input_ids=token, position_ids=position, **{CACHE_ARGUMENT: cache}).logits

    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    results = []
    for cache, run in zip(caches, (step, compiled)):
        token = model(**prompt(family), **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        logits = []
        for position in range(12, 18):
            logits.append(run(token, torch.tensor([[position]]), cache))
            token = logits[-1].argmax(-1)
        results.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    assert len(graphs) == 1
    assert active_call() is None


@torch.no_grad()
def test_a_forward_without_cache_compiles_whole(compressed):
    model = compressed("llama")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = prompt("llama", batch=2)
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, model(**inputs).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_failure_while_compiling_leaves_no_call_open(compressed):
    model = copy.deepcopy(compressed("llama"))
    wanted = greedy(model, **prompt("llama"))
    torch.compiler.reset()
    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(**prompt("llama"), **{CACHE_ARGUMENT: DynamicCache()})
    handle.remove()
    torch.compiler.reset()
    assert torch.equal(greedy(model, **prompt("llama")), wanted)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with_cache = compiled(**prompt("llama"), use_cache=False).logits
    torch.testing.assert_close(with_cache, model(**prompt("llama")).logits, rtol=0, atol=1e-5)
