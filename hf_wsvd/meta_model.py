"""Models without weights, on the meta device: shapes and bytes, nothing allocated."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .auto_class import auto_class_of
from .call import key_norm_module
from .decoder import decoder_attentions, decoder_of, decoder_shape
from .quantizer_config import KeyLayout, LowPrecisionConfig, WSVDConfig
from .surgery import bind_all, insert_empty, unbind_all


class MetaModel:
    """A dense or compressed model on the meta device.

    Args:
        source: a loaded model (its config is taken, nothing else), a config, or a folder or Hub id of one.
        dtype: of the weights; None: that of the loaded model or the config, else bfloat16.
        rank_ratio: compress a dense model to latents of this share of `head_dim`, all of one rank.
        low_precision: quantize a dense model's weights, with or without `rank_ratio`.
        revision: of a Hub repository.

    Attributes:
        model: on the meta device, in evaluation mode; not bound.
        config: what it is compressed by; None for a dense model.
        weights_bytes: parameters and buffers; None for a checkpoint in another quantization, which says nothing of
            the bytes that its weights take.

    Raises:
        ValueError: an encoder-decoder model, one that is neither a causal language model nor an image-text-to-text
            model, or `rank_ratio` or `low_precision` for a model that is compressed or cannot be.
        OSError: no config where `source` points.
    """

    def __init__(
        self,
        source: PreTrainedModel | PretrainedConfig | str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        rank_ratio: float | None = None,
        low_precision: LowPrecisionConfig | dict[str, Any] | None = None,
        revision: str | None = None,
    ):
        if isinstance(source, str | os.PathLike):
            source = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not isinstance(source, PreTrainedModel | PretrainedConfig):
            raise ValueError(f"model must be a transformers model, a config, a folder or a Hub id, got {source!r}")
        config = copy.deepcopy(source.config if isinstance(source, PreTrainedModel) else source)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{config.model_type} is an encoder-decoder model; hf_wsvd estimates decoders only")
        self.dtype = parse_dtype(dtype) or own_dtype(source)
        quantization = vars(config).pop("quantization_config", None)
        self.config = compressed_by(quantization)
        self.model = empty_model(source, config, self.dtype)
        for name, value in (("rank_ratio", rank_ratio), ("low_precision", low_precision)):
            if value is not None and quantization is not None:
                raise ValueError(f"{name}={value} asks about a dense model; this one is quantized already")
        if rank_ratio is not None or low_precision is not None:
            self.config = uniform_config(self.model, rank_ratio, low_precision)
        self._targets = insert_empty(self.model, self.config) if self.config is not None else []
        self.weights_bytes = None
        if quantization is None or self.config is not None:
            storages = (t.untyped_storage() for t in chain(self.model.parameters(), self.model.buffers()))
            self.weights_bytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def bind(self) -> None:
        """Let caches hold latents where the model is compressed."""
        if self.config is not None:
            layouts = {i: KeyLayout.parse(text) for i, text in enumerate(self.config.key_layout)}
            bind_all(self.model, self._targets, layouts)

    def unbind(self) -> None:
        """Let caches hold dense keys and values."""
        unbind_all(self.model)


def empty_model(
    source: PreTrainedModel | PretrainedConfig | str, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of `config` on the meta device, of the class of `source` where that is a model."""
    # Attention and experts in operations that need no values: flash kernels refuse meta, loops over experts look.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if isinstance(source, PreTrainedModel):
            model = type(source)._from_config(config, dtype=dtype)
        else:
            model = auto_class_of(config).from_config(config, dtype=dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), dict):
            module.rope_type = dict.fromkeys(module.rope_type, "default")
        elif hasattr(module, "rope_type"):  # other kinds look at the positions to choose frequencies
            module.rope_type = "default"
    return model.eval()


def compressed_by(quantization: Any) -> WSVDConfig | None:
    """The `WSVDConfig` of a compressed model's config; None for others."""
    if quantization is not None and not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    if not quantization or quantization.get("quant_method") != "wsvd":
        return None
    return WSVDConfig(**quantization)


def uniform_config(
    model: PreTrainedModel,
    rank_ratio: float | None,
    low_precision: LowPrecisionConfig | dict[str, Any] | None = None,
) -> WSVDConfig:
    """What compressing `model` by `rank_ratio` would record, with equal ranks and the usual key layout.

    Layers without rotation count as if they had one: no weights, no experiment that would tell.
    """
    config = WSVDConfig(
        rank_ratio=rank_ratio, rank_allocation="uniform", refinement="none", low_precision=low_precision
    )
    config.decoder_shape = decoder_shape(model)
    rotation = "halves" if any("rotary" in name for name, _ in decoder_of(model).named_modules()) else "none"
    config.key_layout = [None] * model.config.get_text_config(decoder=True).num_hidden_layers
    for attention in decoder_attentions(model) if config.compresses else ():
        norm = "none" if key_norm_module(attention.module) is None else "before"
        config.key_layout[attention.layer] = f"{norm}:{rotation}"
    return config


def own_dtype(source: PreTrainedModel | PretrainedConfig) -> torch.dtype:
    """The dtype that a model has, or that a checkpoint with this config loads in; bfloat16 where it has none."""
    if isinstance(source, PreTrainedModel):
        return source.dtype
    return parse_dtype(source.dtype or source.get_text_config(decoder=True).dtype) or torch.bfloat16


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype or its name; None and "auto" are None. ValueError for one that no model computes in."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype!r} is not allowed; allowed: bfloat16, float16, float32 or float64, or None")
    return found
