"""KV cache bytes a token of a compressed checkpoint, from its config alone. `memory.py` measures them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from ..quantizer_config import WSVDConfig, resolve_ranks


@dataclass(frozen=True)
class LayerSize:
    """What one decoder layer caches a token; ranks and layout are None where keys and values stay dense."""

    layer: int
    k_rank: int | None
    v_rank: int | None
    key_layout: str | None
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class CacheSize:
    """Bytes a token by layer, and of the rotary rows that latent layers share."""

    layers: list[LayerSize]
    heads: int
    head_dim: int
    rotary_bytes: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Of all layers and the rotary rows. Growth slack (at most 1/64, and 8 tokens) comes on top while decoding."""
        return sum(layer.bytes for layer in self.layers) + self.rotary_bytes

    @property
    def dense_bytes(self) -> int:
        """The same of dense keys and values."""
        return sum(layer.dense_bytes for layer in self.layers)

    def summary(self) -> str:
        """One line: ranks, bytes, ratio."""
        latent = [layer for layer in self.layers if layer.key_layout is not None]
        share = f"{self.bytes:,} bytes a token in {self.dtype}, {self.bytes / self.dense_bytes:.1%} of dense"
        if not latent:
            return f"no layer holds latents; KV cache {share}"
        ranks = ", ".join(
            f"{side} rank {_span([getattr(layer, f'{side.lower()}_rank') for layer in latent])}" for side in "KV"
        )
        return (
            f"{len(latent)} of {len(self.layers)} layers hold latents ({ranks} of {self.head_dim}); KV cache {share}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the derived numbers."""
        return {**asdict(self), "bytes": self.bytes, "dense_bytes": self.dense_bytes}


def cache_size(config: PretrainedConfig) -> CacheSize:
    """Bytes a token of a model with this config, from ranks, key layouts and dtype.

    Sliding-window layers count as others do, though they hold no more tokens than their window.

    Raises ValueError for a config without `quantization_config` of hf_wsvd, or whose layers differ in head shape.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    if not quantization or quantization.get("quant_method") != "wsvd":
        found = (quantization or {}).get("quant_method") or "none"
        raise ValueError(f"not a checkpoint compressed by hf_wsvd (quant_method: {found})")
    text = config.get_text_config(decoder=True)
    checked = WSVDConfig(**quantization)
    if checked.decoder_shape is None or checked.key_layout is None:
        raise ValueError("quantization_config lacks decoder_shape or key_layout: no compressed model was saved here")
    heads, head_dim = (_only(checked.decoder_shape, name) for name in ("num_key_value_heads", "head_dim"))
    by_side = [resolve_ranks(checked, side, [head_dim] * len(checked.key_layout)) for side in "kv"]
    dtype = _dtype(config)
    layers = []
    for number, layout in enumerate(checked.key_layout):
        ranks = [side[number] if layout is not None else None for side in by_side]
        widths = [heads * (head_dim if rank is None else rank) for rank in ranks]
        for index, by_layer in enumerate((checked.k_full_heads, checked.v_full_heads)):
            if by_layer is not None and layout is not None:
                widths[index] += len(by_layer[number] or ()) * (head_dim - ranks[index])
        dense = heads * 2 * head_dim * dtype.itemsize
        layers.append(LayerSize(number, *ranks, layout, sum(widths) * dtype.itemsize, dense))
    return CacheSize(layers, heads, head_dim, _rotary_bytes(text, layers, head_dim, dtype), str(dtype).split(".")[-1])


def _only(shape: Mapping[str, Any], name: str) -> int:
    """The one value that all layers share; ValueError if they differ or the record is no list of numbers."""
    values = shape.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int) and value > 0 for value in values):
        raise ValueError(f"WSVDConfig: decoder_shape[{name!r}]={values!r} is not a list of positive integers")
    if not values:
        raise ValueError("the decoder has no attention with `k_proj` and `v_proj` whose cache could be counted")
    if len(values) != 1:
        raise ValueError("layers differ in head shape: load the model and use hf_wsvd.evaluate.memory to measure it")
    return values[0]


def _rotary_bytes(text: PretrainedConfig, layers: list[LayerSize], head_dim: int, dtype: torch.dtype) -> int:
    """cos and sin of every angle, once for each kind of layer that turns its keys."""
    turned = [layer for layer in layers if layer.key_layout is not None and not layer.key_layout.endswith(":none")]
    types = getattr(text, "layer_types", None)
    kinds = {types[layer.layer] if types else None for layer in turned}
    rope = getattr(text, "rope_parameters", None) or {}
    total = 0
    for kind in kinds:
        own = rope.get(kind) if isinstance(rope.get(kind), Mapping) else rope
        partial = own.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
        total += int(head_dim * partial) * dtype.itemsize  # half as many angles, two numbers each
    return total


def _dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype a checkpoint was saved in, which `from_pretrained` loads it in; fp32 where the config has none."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype or torch.float32


def _span(values: list[int]) -> str:
    """ "8", or "8-16" where layers differ; "none" without layers."""
    if not values:
        return "none"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"
