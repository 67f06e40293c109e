"""Tiny vision-language models beside those of `tiny_models`: one builder and one prompt a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models
import torch
import transformers
from tiny_models import IMAGE_TOKEN, TEXT, VISION, randomize
from transformers import PreTrainedModel


VIDEO_TOKEN = 126
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
START_TOKENS = {"vision_start_token_id": 125, "vision_end_token_id": 124}


def llava_next() -> PreTrainedModel:
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=transformers.LlamaConfig(**TEXT),
            image_token_id=IMAGE_TOKEN,
            image_grid_pinpoints=[[32, 32]],
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
        )
    )


def idefics3() -> PreTrainedModel:
    return transformers.Idefics3ForConditionalGeneration(
        transformers.Idefics3Config(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config={**VISION, "patch_size": 8},
            image_token_id=IMAGE_TOKEN,
            scale_factor=2,
            pad_token_id=0,
        )
    )


def qwen2_5_vl() -> PreTrainedModel:
    text = {**TEXT, "hidden_size": 64, "rope_parameters": ROPE}
    del text["head_dim"]
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **VISION_TOKENS, **START_TOKENS)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    randomize(model.model.language_model, "k_proj.bias", "v_proj.bias")
    return model


def qwen3_vl() -> PreTrainedModel:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 48,
        "num_heads": 2,
        "patch_size": 8,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text = {**TEXT, "rope_parameters": ROPE}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **VISION_TOKENS, **START_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def internvl() -> PreTrainedModel:
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    return transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**TEXT),
            vision_config=vision,
            image_token_id=IMAGE_TOKEN,
            downsample_ratio=0.5,
        )
    )


def gemma3() -> PreTrainedModel:
    """Sliding layers around one of full attention."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": kinds}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**text),
            vision_config={**VISION, "patch_size": 8},
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=125,
            eoi_token_index=124,
        )
    )


def paligemma() -> PreTrainedModel:
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config=transformers.GemmaConfig(**TEXT),
            vision_config={**VISION, "vision_use_head": False},
            projection_dim=48,
            image_token_index=IMAGE_TOKEN,
            hidden_size=48,
        )
    )


OTHER_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    f.__name__: f for f in (llava_next, idefics3, qwen2_5_vl, qwen3_vl, internvl, gemma3, paligemma)
}
FAMILIES = [*(f.__name__ for f in tiny_models.VISION_FAMILIES), *OTHER_FAMILIES]


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of `family` in evaluation mode, fp32, that never ends by itself."""
    if family not in OTHER_FAMILIES:
        return tiny_models.build(family, seed)
    torch.manual_seed(seed)
    model = OTHER_FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(family: str, batch: int = 1, tokens: int = 12, starts: list[int] | None = None) -> dict[str, Any]:
    """A prompt of `tokens` tokens a row with one image of four tokens (ten in LLaVA-NeXT).

    Args:
        starts: where the image of each row starts; None: at 2.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (batch, tokens), generator=generator)
    count = 10 if family == "llava_next" else 4
    for row, start in enumerate(starts or [2] * batch):
        ids[row, start - 1] = 125
        ids[row, start : start + count] = IMAGE_TOKEN
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shape: tuple[int, ...] = (batch, 3, 32, 32)
    if family.startswith("qwen"):
        shape = (batch * 16, 3 * 2 * 8 * 8)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    elif family in ("smolvlm", "idefics3"):
        shape = (batch, 1, 3, 32, 32)
    elif family == "llava_next":
        shape = (batch, 2, 3, 32, 32)
        inputs["image_sizes"] = torch.tensor([[32, 32]] * batch)
    elif family in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    inputs["pixel_values"] = torch.randn(shape, generator=generator)
    return inputs
