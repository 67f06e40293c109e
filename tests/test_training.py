"""Copies of compressed models, and gradients through them."""

from __future__ import annotations

import copy

import pytest
import torch
from model_facts import logits
from tiny_models import prompt

import hf_wsvd
from hf_wsvd.decoder import decoder_attentions


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_a_deep_copy_is_independent(family, compressed):
    original = compressed(family)
    before = logits(original, family)
    twin = copy.deepcopy(original)
    assert torch.equal(logits(twin, family), before)
    for attention in decoder_attentions(twin):
        attention.module.v_proj.weight.data.zero_()
    assert torch.equal(logits(original, family), before)
    assert not torch.equal(logits(twin, family), before)
    twin.dequantize()
    generated = original.generate(**prompt(family), max_new_tokens=4, return_dict_in_generate=True)
    assert hf_wsvd.cache_nbytes(next(v for v in generated.values() if hasattr(v, "layers"))) > 0
    assert torch.equal(logits(original, family), before)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_reaches_both_factors_and_matches_finite_differences(compressed, use_cache, checkpointing):
    model = copy.deepcopy(compressed("qwen2")).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    batch = prompt("qwen2", batch=2)
    loss = model(**batch, labels=batch["input_ids"], use_cache=use_cache).loss
    loss.backward()
    for attention in decoder_attentions(model):
        for side in "kv":
            projection = getattr(attention.module, f"{side}_proj")
            for name in ("weight", "up", "bias"):
                assert getattr(projection, name).grad.abs().max() > 0, f"{attention.layer}.{side}.{name}"
    weight = model.model.layers[1].self_attn.k_proj.up
    direction = weight.grad / weight.grad.norm()
    with torch.no_grad():
        losses = []
        for step in (1e-2, -1e-2):
            weight += step * direction
            losses.append(model(**batch, labels=batch["input_ids"], use_cache=False).loss)
            weight -= step * direction
    assert ((losses[0] - losses[1]) / 2e-2).item() == pytest.approx(weight.grad.norm().item(), rel=0.05)
    weight_before = weight.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(weight, weight_before)
