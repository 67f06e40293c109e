"""Bytes of KV cache a token, measured from the cache after a prefill and a few decode steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..cache import cache_nbytes
from ..calibration.chat import place
from ..compat import CACHE_ARGUMENT


@dataclass(frozen=True)
class CacheBytes:
    """A measured cache: every byte its storages hold, growth slack and rope rows included."""

    bytes: int
    dense_bytes: int
    batch_size: int
    tokens: int  # cached tokens of one sequence

    @property
    def per_token(self) -> float:
        """Bytes a token of one sequence, all layers together."""
        return self.bytes / (self.batch_size * self.tokens)

    @property
    def dense_per_token(self) -> float:
        """The same of dense keys and values in the model's dtype."""
        return self.dense_bytes / (self.batch_size * self.tokens)

    @property
    def ratio(self) -> float:
        """Bytes over dense bytes."""
        return self.bytes / self.dense_bytes


def kv_bytes_per_token(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], decode_steps: int = 8
) -> CacheBytes:
    """Fill a `DynamicCache` and one that keeps dense keys and values with the same tokens, and count both.

    Args:
        inputs: model inputs with `input_ids` `[B, S]`, left-padded if padded; the cache then holds `S + decode_steps`
            tokens of each sequence.
    """
    caches = [DynamicCache(config=model.config), dense_cache(model)]
    for cache in caches:
        fill(model, cache, inputs, decode_steps)
    sizes = [cache_nbytes(cache) for cache in caches]
    return CacheBytes(*sizes, batch_size=inputs["input_ids"].shape[0], tokens=caches[0].get_seq_length())


def dense_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache that no plugin replaces: layers of a subclass, where only the stock classes themselves are upgraded."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.__class__ = type(f"Dense{type(layer).__name__}", (type(layer),), {})
    return cache


def fill(model: PreTrainedModel, cache: Cache, inputs: Mapping[str, torch.Tensor], decode_steps: int) -> None:
    """Run the prompt and `decode_steps` greedy tokens into `cache`."""
    inputs = place(inputs, model)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    with torch.no_grad():
        output = model(**{**inputs, "attention_mask": mask, "use_cache": True, CACHE_ARGUMENT: cache})
        for _ in range(decode_steps):
            token = output.logits[:, -1:].argmax(-1).to(mask.device)
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            output = model(**{"input_ids": token, "attention_mask": mask, "use_cache": True, CACHE_ARGUMENT: cache})
