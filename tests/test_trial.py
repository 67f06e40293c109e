"""Models whose attention cannot work on latents keep their dense cache, found by experiment."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_models import CLOSED_FORM, TEXT, build, prompt

from hf_wsvd import WSVDCache, WSVDConfig, compress
from hf_wsvd.trial import layers_that_need_keys


def difference_llama():
    """Attends twice, with halves of the cached values exchanged."""
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**TEXT))


def doge():
    """Makes its mask from the cached values."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**TEXT))


def assert_generates_like_its_merged_twin(model):
    merged = copy.deepcopy(model).dequantize()
    tokens = [m.generate(**prompt("llama", batch=2), max_new_tokens=10, do_sample=False) for m in (model, merged)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", [difference_llama, doge])
def test_foreign_attention_gets_keys_and_values(family):
    torch.manual_seed(0)
    model = family().eval()
    model.generation_config.eos_token_id = None
    compress(model, WSVDConfig(**CLOSED_FORM), calibration=[prompt("llama", batch=2)])
    assert model.config.quantization_config.key_layout == [None, None, None]
    merged = copy.deepcopy(model).dequantize()
    options = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(
        model.generate(**prompt("llama", 2), **options), merged.generate(**prompt("llama", 2), **options)
    )


def test_a_layer_that_goes_wrong_is_found(compressed, monkeypatch):
    """Attention that ignores the cached tokens of one layer."""
    import hf_wsvd.attention as attention

    model = compressed("llama", 0.5)
    honest = attention.latent_attention
    spoiled = model.model.layers[1].self_attn

    def forgetful(query, key, value, rotation, mask, **options):
        out = honest(query, key, value, rotation, mask, **options)
        return out * 0.5 if attention.active_call().attention is spoiled else out

    monkeypatch.setattr(attention, "latent_attention", forgetful)
    assert layers_that_need_keys(model, attention.decoder_attentions(model)) == {1}


def test_caches_of_a_model_share_one_trial(dense, monkeypatch):
    """`generate` makes a cache to ask what it can be: a trial in each call would cost steps, and compile them anew."""
    import hf_wsvd.attention as attention

    trials = []
    monkeypatch.setattr(attention, "kernels_can_run", lambda: True)
    monkeypatch.setattr(attention, "layers_that_need_keys", lambda *args, **options: trials.append(args) or {1})
    model = copy.deepcopy(dense("llama"))
    model.set_attn_implementation("wsvd")
    for _ in range(2):
        WSVDCache(model, bits=8)
    assert len(trials) == 1
    assert [attention.is_hooked(layer.self_attn) for layer in model.model.layers] == [True, False, True]


def test_two_models_may_share_a_configuration():
    first = build("llama")
    for _ in range(2):
        model = transformers.LlamaForCausalLM(first.config)
        compress(model, WSVDConfig(**CLOSED_FORM), calibration=[prompt("llama", batch=2)])
        assert None not in model.config.quantization_config.key_layout


def test_hybrid_models_keep_what_is_not_attention():
    """Linear-attention layers beside attention layers: only the latter hold latents."""
    shape = {k: v for k, v in TEXT.items() if k != "num_hidden_layers"}
    config = transformers.Lfm2Config(**shape, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    compress(model, WSVDConfig(**CLOSED_FORM), calibration=[prompt("llama", batch=2)])
    layouts = model.config.quantization_config.key_layout
    assert layouts[0] is layouts[2] is None is not layouts[1]
    merged = copy.deepcopy(model).dequantize()
    options = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(
        model.generate(**prompt("llama", 2), **options), merged.generate(**prompt("llama", 2), **options)
    )
