"""Where in a model the layers stand that can be compressed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import Cache, PreTrainedModel

from .low_precision.latent import QuantizedLatentProjection
from .low_precision.linear import QuantizedLinear
from .modules import LatentProjection


# Subclasses of Linear compute something else than `weight` says (quantized or scaled weights).
PROJECTIONS = (nn.Linear, LatentProjection, QuantizedLinear, QuantizedLatentProjection)


@dataclass(frozen=True)
class DecoderAttention:
    """One attention layer of the text decoder.

    Attributes:
        layer: decoder layer number.
        name: module name within the model, e.g. `model.layers.3.self_attn`.
        module: the layer itself, with `k_proj` and `v_proj`.
        head_dim, heads: of its keys and values.
    """

    layer: int
    name: str
    module: nn.Module
    head_dim: int
    heads: int

    def side_name(self, side: str) -> str:
        """Module name of the projection `side` ("q", "k" or "v")."""
        return f"{self.name}.{side}_proj"

    def heads_of(self, side: str) -> int:
        """Heads of a projection's output; 0 for queries that are no plain linear layer of whole heads."""
        if side != "q":
            return self.heads
        projection = getattr(self.module, "q_proj", None)
        if type(projection) not in PROJECTIONS:
            return 0
        heads, rest = divmod(projection.out_features, self.head_dim)
        # Queries with a gate beside them (Qwen3-Next) are twice as wide as the heads that `o_proj` reads.
        output = getattr(self.module, "o_proj", None)
        plain = rest == 0 and getattr(output, "in_features", None) == projection.out_features
        return heads if plain and projection.in_features == self.module.k_proj.in_features else 0


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder: what `get_decoder` gives, or the base model of families whose `get_decoder` gives a layer."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def own_cache_class(model: PreTrainedModel) -> type[Cache] | None:
    """The kind of cache that a family brings along in its modeling file and takes no other for; None for most."""
    decoder = decoder_of(model)
    module = sys.modules[type(decoder).__module__]
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Cache) and value.__module__ == module.__name__:
            return value
    return None


def decoder_attentions(model: PreTrainedModel) -> list[DecoderAttention]:
    """Attention layers of the text decoder with separate key and value projections, in layer order.

    Vision towers are left out (their attention has a `k_proj` too): only the text decoder is looked at.

    Raises:
        ValueError: for an encoder-decoder model, whose cross attention holds no growing cache.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; hf_wsvd compresses decoders only")
    decoder = decoder_of(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    found = []
    for name, module in decoder.named_modules():
        projections = [getattr(module, f"{side}_proj", None) for side in "kv"]
        if not all(type(projection) in PROJECTIONS for projection in projections):
            continue
        if getattr(module, "layer_idx", None) is None or getattr(module, "head_dim", None) is None:
            continue
        if getattr(module, "is_kv_shared_layer", False):  # reads another layer's cache, holds none
            continue
        heads, rest = divmod(projections[0].out_features, module.head_dim)
        if rest == 0 and projections[1].out_features == projections[0].out_features:
            full_name = ".".join(part for part in (prefix, name) if part)
            found.append(DecoderAttention(module.layer_idx, full_name, module, module.head_dim, heads))
    return sorted(found, key=lambda attention: attention.layer)


def key_value_heads(model: PreTrainedModel) -> list[int]:
    """Physical KV heads of every decoder layer, 0 for one without keys and values of its own."""
    counts = [0] * model.config.get_text_config(decoder=True).num_hidden_layers
    for attention in decoder_attentions(model):
        counts[attention.layer] = attention.heads
    return counts


def decoder_shape(model: PreTrainedModel) -> dict[str, object]:
    """What a checkpoint's factors fit: recorded at compression, compared at load."""
    config = model.config.get_text_config(decoder=True)
    attentions = decoder_attentions(model)
    return {
        "model_type": model.config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_key_value_heads": sorted({a.heads for a in attentions}),
        "head_dim": sorted({a.head_dim for a in attentions}),
    }


def matches(name: str, patterns: list[str] | None) -> bool:
    """Whether a module name is one of `patterns`, lies under one, or ends in one (whole dotted parts)."""
    parts = name.split(".")
    for pattern in patterns or ():
        wanted = pattern.split(".")
        if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1)):
            return True
    return False


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside; outside every module has the mode it had (a frozen tower may be in another)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
