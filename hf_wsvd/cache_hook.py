"""Packed storage of dense layers in every cache that a model meets, for `WSVDConfig.cache`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from .cache import WSVDCache
from .compat import CACHE_ARGUMENT, CACHE_ARGUMENTS
from .decoder import decoder_of
from .image_tokens import unwatch_image_tokens
from .quantizer_config import CacheConfig, LayerStorage
from .upgrade import create_layers, upgraded


class CacheHook:
    """What the hook of a decoder knows.

    Attributes:
        storages: of the layers that hold dense keys and values.
        position: of the cache among the positional arguments of the decoder's forward.
    """

    def __init__(self, storages: dict[int, LayerStorage], position: int):
        self.storages, self.position = storages, position
        self.handle: Any = None


def install_cache_hook(model: PreTrainedModel, cache_config: CacheConfig, latent: set[int]) -> None:
    """Let the decoder turn empty stock layers of any cache into packed ones.

    Args:
        latent: layers that hold latents, which their own hooks take care of.

    Raises:
        ValueError: as `WSVDCache` of this config, and for a decoder whose forward takes no cache.
    """
    # Whatever is wrong with it shows now and not at the first token; from here on the model tells its image tokens.
    WSVDCache(model, cache_config=cache_config)
    decoder = decoder_of(model)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    storages = {
        number: cache_config.storage(number, layers, False) for number in range(layers) if number not in latent
    }
    packed = {number: storage for number, storage in storages.items() if not storage.whole}
    if not packed:
        return
    parameters = inspect.signature(decoder.forward).parameters
    if CACHE_ARGUMENT not in parameters:
        raise ValueError(f"{type(decoder).__name__}.forward takes no `{CACHE_ARGUMENT}`: its caches cannot be packed")
    decoder._wsvd_cache = CacheHook(packed, list(parameters).index(CACHE_ARGUMENT))
    decoder._wsvd_cache.handle = decoder.register_forward_pre_hook(pack_dense_layers, prepend=True, with_kwargs=True)


def remove_cache_hook(model: PreTrainedModel) -> None:
    """Undo `install_cache_hook`; nothing where it was not installed."""
    unwatch_image_tokens(model)
    hook = vars(decoder_of(model)).pop("_wsvd_cache", None)
    if hook is not None:
        hook.handle.remove()


def pack_dense_layers(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pre-hook of the decoder: replace stock layers that are still empty, in the given cache or in a new one."""
    hook = decoder._wsvd_cache
    name = next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), CACHE_ARGUMENT)
    positional = len(args) > hook.position
    cache = args[hook.position] if positional else kwargs.get(name)
    if cache is None:
        use_cache = kwargs.get("use_cache")
        if not (getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache):
            return None
        cache = DynamicCache(config=decoder.config)  # as the decoder itself would
        if positional:
            args = (*args[: hook.position], cache, *args[hook.position + 1 :])
        else:
            kwargs = {**kwargs, name: cache}
    if isinstance(cache, Cache):
        create_layers(cache, max(hook.storages) + 1)
        for number, storage in hook.storages.items():
            if number < len(cache.layers):  # layers that share another one's keys have none of their own
                cache.layers[number] = upgraded(cache.layers[number], False, storage) or cache.layers[number]
    return args, kwargs
