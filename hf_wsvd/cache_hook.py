"""Packed storage of dense layers in every cache that a model meets, for `WSVDConfig.cache`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from .compat import CACHE_ARGUMENT, cache_of
from .quantizer_config import CacheConfig, LayerStorage
from .upgrade import create_layers, upgraded


class CacheHook:
    """What the hook of a decoder knows: the storage of the layers that hold dense keys and values."""

    def __init__(self, storages: dict[int, LayerStorage]):
        self.storages = storages
        self.handle: Any = None


def install_cache_hook(model: PreTrainedModel, cache_config: CacheConfig, latent: set[int]) -> None:
    """Let the decoder turn empty stock layers of any cache into packed ones.

    Args:
        latent: layers that hold latents, which their own hooks take care of.

    Raises:
        ValueError: layer numbers that the decoder does not have.
    """
    decoder = model.get_decoder()
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    storages = {
        number: cache_config.storage(number, layers, False) for number in range(layers) if number not in latent
    }
    packed = {number: storage for number, storage in storages.items() if not storage.whole}
    if packed:
        decoder._wsvd_cache = CacheHook(packed)
        decoder._wsvd_cache.handle = decoder.register_forward_pre_hook(pack_dense_layers, with_kwargs=True)


def remove_cache_hook(model: PreTrainedModel) -> None:
    """Undo `install_cache_hook`; nothing where it was not installed."""
    hook = vars(model.get_decoder()).pop("_wsvd_cache", None)
    if hook is not None:
        hook.handle.remove()


def pack_dense_layers(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pre-hook of the decoder: replace stock layers that are still empty, in the given cache or in a new one."""
    cache = cache_of(kwargs)
    if cache is None:
        use_cache = kwargs.get("use_cache")
        if not (getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache):
            return None
        cache = DynamicCache(config=decoder.config)  # as the decoder itself would
        kwargs = {**kwargs, CACHE_ARGUMENT: cache}
    if isinstance(cache, Cache):
        storages = decoder._wsvd_cache.storages
        create_layers(cache, max(storages) + 1)
        for number, storage in storages.items():
            if number < len(cache.layers):  # layers that share another one's keys have none of their own
                cache.layers[number] = upgraded(cache.layers[number], False, storage) or cache.layers[number]
    return args, kwargs
