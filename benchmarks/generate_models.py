"""Models of known shapes for benchmarks/generate.py: random weights, dense or with latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from hf_wsvd import WSVDConfig, compress
from hf_wsvd.assets import demo_model_path
from hf_wsvd.meta_model import uniform_config
from hf_wsvd.model_class import install_methods
from hf_wsvd.modules import LatentProjection
from hf_wsvd.quantizer import WSVDHfQuantizer
from hf_wsvd.quantizer_config import KeyLayout
from hf_wsvd.surgery import bind_all, insert_empty


POSITIONS = 1 << 17  # more than any run: speed does not depend on it


def llava_7b() -> PreTrainedModel:
    """The language model of LLaVA-1.5-7B: 32 layers, 32 query and KV heads of 128."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=32, max_position_embeddings=POSITIONS,
        )
    )  # fmt: skip


def qwen2_5_vl_7b() -> PreTrainedModel:
    """Qwen2.5-VL-7B with a small vision tower: 28 layers, 28 query and 4 KV heads of 128, biases, M-RoPE."""
    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 3584}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def tiny() -> PreTrainedModel:
    """For a look at the script itself."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS,
        )
    )  # fmt: skip


def embedded() -> PreTrainedModel:
    """The trained model that the package ships."""
    return AutoModelForImageTextToText.from_pretrained(demo_model_path())


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava-1.5-7b": llava_7b,
    "qwen2.5-vl-7b": qwen2_5_vl_7b,
    "embedded": embedded,
    "tiny": tiny,
}


def dense_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A dense model that stops at the given length alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = MODELS[name]()
    finally:
        torch.set_default_dtype(before)
    model = model.to(device=device, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def latent_model(
    name: str, device: torch.device, dtype: torch.dtype, rank_ratio: float | None, cache: dict[str, Any] | None
) -> PreTrainedModel:
    """The same with latents of random factors: nothing is fitted, for no time depends on the numbers.

    `rank_ratio` None packs keys and values as they are.
    """
    model = dense_model(name, device, dtype)
    if rank_ratio is None:
        return compress(model, WSVDConfig(rank_ratio=None, cache=cache))
    config = uniform_config(model, rank_ratio)
    config.cache = cache
    config.post_init()
    chosen = insert_empty(model, config)
    for module in model.modules():
        if isinstance(module, LatentProjection):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
    layouts = {number: KeyLayout.parse(text) for number, text in enumerate(config.key_layout)}
    bind_all(model, chosen, layouts, config.storage)
    model.hf_quantizer = WSVDHfQuantizer(config, pre_quantized=True)
    install_methods(model)
    return model.eval()
