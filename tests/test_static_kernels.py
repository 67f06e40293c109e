"""What kernels read of a cache of fixed size: the filled slots, from addresses that stay from prompt to prompt."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_models import Counted, checked_definition
from tiny_models import prompt
from transformers import PreTrainedModel

from hf_wsvd import WSVDCache, attention
from hf_wsvd.compat import CACHE_ARGUMENT


FORMS = {
    "latent": ("llama", {}),
    "window": ("mistral", {}),
    "norm": ("qwen3", {"bits": 8}),
    "fp8": ("llama", {"scheme": "fp8"}),
    "hadamard": ("llama", {"scheme": "hadamard", "bits": 4}),
    "packed window": ("mistral", {"scheme": "fp8"}),
}


@pytest.fixture
def steps(monkeypatch, by_definition):
    """Arguments of the kernel in every step of a generation."""
    monkeypatch.setattr(PreTrainedModel, "get_compiled_call", lambda model, compile_config: model.__call__)
    seen = []

    def recorded(*args, **options):
        seen.append((*args, options))
        return checked_definition(*args, **options)

    monkeypatch.setattr(attention, "fused_attention", Counted(recorded))
    return seen


def generated(model, cache, tokens, padding=0):
    inputs = prompt("llama", 2, tokens, seed=tokens)
    inputs["attention_mask"][0, :padding] = 0
    options = {"max_new_tokens": 4, "do_sample": False}
    return model.generate(**inputs, **options, **({} if cache is None else {CACHE_ARGUMENT: cache}))


def fixed_tensors(step):
    """Those that stay from prompt to prompt: payload, scales, expansions, rotary rows, the norm's weight."""
    _, parts, rotation, _, options = step
    norm = options["norm"]
    found = [*(tensor for part in parts for side in part[:2] for tensor in side), *parts[0][2:6], *(rotation or ())]
    found += [] if norm is None else [norm.weight]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize(("family", "storage"), FORMS.values(), ids=FORMS)
def test_kernels_read_the_filled_slots_from_addresses_that_stay(family, storage, compressed, steps):
    model = copy.deepcopy(compressed(family))
    cache, window = WSVDCache(model, max_cache_len=32, **storage), getattr(model.config, "sliding_window", None)
    found = []
    for tokens, padding in ((12, 0), (7, 2)):
        growing = generated(model, WSVDCache(model, **storage), tokens, padding)
        steps.clear()
        assert torch.equal(generated(model, cache, tokens, padding), growing)
        lengths = [step[-1]["lengths"].tolist() for step in steps[::3]]
        assert lengths == [[min(tokens + count, window or 32)] * 2 for count in (1, 2, 3)]
        found.append([[tensor.data_ptr() for tensor in fixed_tensors(step)] for step in steps])
        cache.reset()
    assert found[0] == found[1]


def test_expansions_of_a_new_prompt_follow_the_weights(compressed, steps):
    model = copy.deepcopy(compressed("llama"))
    cache = WSVDCache(model, max_cache_len=32, scheme="hadamard", bits=4)
    generated(model, cache, 12)
    before = steps[-1][1][0].key_up.clone()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.up *= 2
    cache.reset()
    generated(model, cache, 12)
    torch.testing.assert_close(steps[-1][1][0].key_up, 2 * before)
