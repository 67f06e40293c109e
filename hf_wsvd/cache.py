"""Latent layers in any cache: upgraded in place on first touch, or all at once as `WSVDCache`."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

from .cache_layers import LATENT_LAYERS, LatentMixin
from .token_buffer import TokenBuffer


def upgraded(layer: CacheLayerMixin) -> LatentMixin | None:
    """A latent layer with the limits and state of an empty stock layer; None if there is none of its kind."""
    latent_class = LATENT_LAYERS.get(type(layer))
    if latent_class is None or (layer.is_initialized and int(layer.get_seq_length()) > 0):
        return None
    new = latent_class.__new__(latent_class)
    state = {k: v for k, v in vars(layer).items() if k not in ("keys", "values")}
    vars(new).update(state)
    # A static layer may have been given dense shapes ahead of time (`early_initialization`): allocate anew.
    new.keys = new.values = None
    new.is_initialized = False
    return new


def latent_layer(cache: object, layer_idx: int, row_key: tuple | None) -> LatentMixin | None:
    """The latent layer of `cache` for decoder layer `layer_idx`, upgrading an empty stock layer in place.

    Args:
        row_key: what layers must share to share rotary rows (device and kind of rotation); None without rotation.

    Returns:
        None where latents cannot be held: no cache, a cache of another kind, or dense keys in it already.
    """
    if not isinstance(cache, Cache):
        return None
    if cache.layer_class_to_replicate is not None:  # layers are created as they are met
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if not isinstance(layer, LatentMixin):
        layer = upgraded(layer)
        if layer is None:
            return None
        cache.layers[layer_idx] = layer
    if layer.rows is None and row_key is not None:
        share_rows(cache, layer, row_key)
    return layer


def share_rows(cache: Cache, layer: LatentMixin, row_key: tuple) -> None:
    """Give `layer` the rotary rows of an earlier layer with the same key and kind, or rows of its own."""
    layer.rows_key = (*row_key, type(layer))
    for other in cache.layers:
        if isinstance(other, LatentMixin) and other.rows is not None and other.rows_key == layer.rows_key:
            layer.rows = other.rows
            return
    layer.rows, layer.owns_rows = layer.new_rows(), True


class WSVDCache(Cache):
    """The latent cache of a compressed model, built ahead of the first call.

    `generate` and a bare forward make the same cache by themselves; build it to hold it across calls (multi-turn
    chat) or to fix its size. `cache_nbytes(cache)` measures it.

    Args:
        model: a model compressed by hf_wsvd.
        max_cache_len: tokens to allocate at fixed addresses (for compiled decoding); None grows as needed.

    Raises:
        ValueError: if the model is not compressed, or `max_cache_len` is not a positive number.
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int | None = None):
        from .attention import bound_layers

        latent = bound_layers(model)
        if not latent:
            raise ValueError(f"WSVDCache: {type(model).__name__} holds no layer compressed by hf_wsvd")
        counts = isinstance(max_cache_len, int) and not isinstance(max_cache_len, bool) and max_cache_len > 0
        if max_cache_len is not None and not counts:
            raise ValueError(
                f"WSVDCache: max_cache_len={max_cache_len!r} is not allowed; allowed: at least 1, or None"
            )
        config = model.config.get_text_config(decoder=True)
        stock = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
        layers = [
            (upgraded(layer) or layer) if number in latent else layer for number, layer in enumerate(stock.layers)
        ]
        super().__init__(layers=layers)


def cache_nbytes(cache: Cache) -> int:
    """Bytes of memory that a cache keeps allocated: payload, growth slack, rotary rows, scales and windows.

    Works for any transformers cache. Storage shared by several tensors is counted once.
    """
    storages: dict[tuple[str, int], int] = {}

    def visit(value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[(str(value.device), storage.data_ptr())] = storage.nbytes()
        elif depth == 0:
            return
        elif isinstance(value, dict):
            for entry in value.values():
                visit(entry, depth - 1)
        elif isinstance(value, list | tuple):
            for entry in value:
                visit(entry, depth - 1)
        elif isinstance(value, TokenBuffer | CacheLayerMixin):
            visit({k: v for k, v in vars(value).items() if k != "visible"}, depth)

    with torch.no_grad():
        for layer in cache.layers:
            visit(layer, 4)
    return sum(storages.values())
