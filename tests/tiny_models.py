"""Tiny random models, one a family, built from config: head_dim 16, three decoder layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel


# Equal ranks and no refinement: ranks that are known in advance, and quick. Tests of the fit ask for more.
CLOSED_FORM = {"rank_allocation": "uniform", "refinement": "none"}

VOCABULARY = 128
IMAGE_TOKEN = 127

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Large enough for attention that is far from uniform: errors in positions or masks must show.
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def llama_mha() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "num_key_value_heads": 4}))


def qwen2() -> PreTrainedModel:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT))
    randomize(model, "k_proj.bias", "v_proj.bias")
    return model


def qwen3() -> PreTrainedModel:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT))
    randomize(model, "k_norm.weight")
    return model


def mistral() -> PreTrainedModel:
    """Every layer slides over a window far shorter than the prompts of the tests."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, sliding_window=8))


def llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE_TOKEN,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> PreTrainedModel:
    """Rotary rows merged from three position axes, biases on q, k and v."""
    text = {k: v for k, v in TEXT.items() if k not in ("head_dim",)} | {"hidden_size": 64}
    config = transformers.Qwen2VLConfig(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=126,
        vision_start_token_id=125,
        vision_end_token_id=124,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    randomize(model.model.language_model, "k_proj.bias", "v_proj.bias")
    return model


def smolvlm() -> PreTrainedModel:
    config = transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config={**VISION, "patch_size": 8},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


TEXT_FAMILIES = [llama, llama_mha, qwen2, qwen3, mistral]
VISION_FAMILIES = [llava, qwen2_vl, smolvlm]
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {f.__name__: f for f in (*TEXT_FAMILIES, *VISION_FAMILIES)}


def randomize(model: PreTrainedModel, *names: str) -> None:
    """Give parameters that start as zeros or ones values that matter."""
    for name, parameter in model.named_parameters():
        if name.endswith(names):
            parameter.data += torch.randn_like(parameter) * 0.5


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of `family` in evaluation mode, fp32."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None  # every test decides itself how long it generates
    model.generation_config.pad_token_id = 0
    return model


def prompt(family: str, batch: int = 1, tokens: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """A prompt of `tokens` tokens; vision-language models get one image in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 120, (batch, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "llava":
        ids[:, 2:6] = IMAGE_TOKEN
        inputs["pixel_values"] = torch.randn(batch, 3, 32, 32, generator=generator)
    elif family == "qwen2_vl":
        ids[:, 1] = 125
        ids[:, 2:6] = IMAGE_TOKEN
        inputs["pixel_values"] = torch.randn(batch * 16, 3 * 2 * 8 * 8, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    elif family == "smolvlm":
        ids[:, 2:6] = IMAGE_TOKEN
        inputs["pixel_values"] = torch.randn(batch, 1, 3, 32, 32, generator=generator)
    return inputs


def calibration_batches(family: str) -> list[dict[str, torch.Tensor]]:
    """Enough tokens (128) to give every direction of the 48 inputs of `k_proj` some weight."""
    return [prompt(family, batch=4, tokens=16, seed=seed) for seed in (101, 102)]
