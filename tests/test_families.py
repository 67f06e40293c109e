"""Families of other shapes: latents where their attention can work on them, a dense cache where not, never garbage."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from tiny_models import TEXT, calibration_batches, prompt
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, PreTrainedModel

import hf_wsvd
from hf_wsvd.latent_layers import LatentMixin


# Model type, what its configuration needs besides the usual, the key layout of its three layers.
WITH_LATENTS = {
    "gemma2": ({"query_pre_attn_scalar": 16, "sliding_window": 8}, "none:halves"),
    "gemma3_text": ({"query_pre_attn_scalar": 16, "sliding_window": 8}, "before:halves"),
    "cohere": ({}, "none:interleaved"),
    "cohere2": ({"sliding_window": 8}, "none:interleaved"),
    "glm": ({}, "none:interleaved_halves"),
    "hunyuan_v1_dense": ({}, "after:halves"),
    "mixtral": ({"num_local_experts": 2}, "none:halves"),
    "phi": ({}, "none:halves"),
    "opt": ({"num_key_value_heads": 4, "head_dim": 12}, "none:none"),
    "exaone4": ({"sliding_window": 8, "sliding_window_pattern": 2}, ["before:halves", "before:none", "before:halves"]),
}
WITHOUT_LATENTS = {
    "olmo2": {},  # a norm over all heads together
    "diffllama": {},  # rearranges the values between cache and attention
    "doge": {},  # computes a mask from the values that the cache returned
    "xglm": {"d_model": 48, "attention_heads": 4, "num_layers": 3, "ffn_dim": 64},  # calls no attention function
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },  # one cache layer for two things
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8},  # attention sinks
}


def build(model_type: str, options: dict) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**TEXT, **options})).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: PreTrainedModel) -> tuple[torch.Tensor, Cache]:
    """Logits of eight greedy steps after a left-padded prompt longer than any window, and the cache."""
    inputs = prompt("llama", batch=2, tokens=14)
    inputs["attention_mask"][0, :3] = 0
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return torch.stack(out.logits), next(value for value in out.values() if isinstance(value, Cache))


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "falcon_h1" else name
        for name in (*WITH_LATENTS, *WITHOUT_LATENTS)
    ],
)
def test_generation_equals_the_merged_model(model_type, monkeypatch):
    options, layout = WITH_LATENTS.get(model_type) or (WITHOUT_LATENTS[model_type], None)
    warnings: list[str] = []
    for module in (hf_wsvd.probe, hf_wsvd.trial):
        monkeypatch.setattr(module.logger, "warning", warnings.append)
    model = hf_wsvd.compress(build(model_type, options), calibration=calibration_batches("llama"))
    logits, cache = generate(model)
    wanted, _ = generate(copy.deepcopy(model).dequantize())
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)

    layouts = layout if isinstance(layout, list) else [layout] * 3
    assert model.config.quantization_config.key_layout == layouts
    assert all(isinstance(layer, LatentMixin) is (layout is not None) for layer in cache.layers)
    assert bool(warnings) is (layout is None)
    assert all("[0, 1, 2]" in text and "cache stays dense" in text for text in warnings)


def test_an_attention_that_changes_cached_keys_is_an_error_not_garbage(compressed, monkeypatch):
    model = compressed("llama")
    modeling = importlib.import_module(type(model).__module__)
    functions = modeling.ALL_ATTENTION_FUNCTIONS

    class Changing:
        def get_interface(self, *args):
            attend = functions.get_interface(*args)
            return lambda module, query, key, value, *rest, **options: attend(
                module, query, key, value + 0, *rest, **options
            )

    monkeypatch.setattr(modeling, "ALL_ATTENTION_FUNCTIONS", Changing())
    with pytest.raises(RuntimeError, match="LlamaAttention changes cached keys or values"):
        model.generate(**prompt("llama"), max_new_tokens=3)
