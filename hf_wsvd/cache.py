"""`WSVDCache`: the cache of any decoder, with latents where the model is compressed, in any storage."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from .attention import bind_packed, bound_layers
from .cache_layers import StoredMixin
from .decoder import decoder_attentions, key_value_heads, own_cache_class
from .fingerprint import ModelReference
from .image_tokens import reads_images, watch_image_tokens
from .latent_layers import LatentMixin
from .memory_report import MemoryReport, allocations, memory_report
from .prefill import install_prefill_hook
from .quantizer_config import CacheConfig, LayerStorage, WSVDConfig
from .static_layers import mask_prompts_alone
from .storage import make_store
from .storage.narrow import narrowed
from .upgrade import upgraded


logger = logging.get_logger("hf_wsvd")


class WSVDCache(Cache):
    """A KV cache that grows without concatenation and keeps its tokens packed, for any decoder model.

    Over a model compressed by hf_wsvd it holds latents; over any other, keys and values. Sliding layers stay sliding;
    layers that hold no keys and values (linear attention) stay as transformers makes them.

    Args:
        model: the model that the cache is for.
        bits: 16, 8, 4, 3 or 2; with the other fields of `CacheConfig` (`scheme`, `key_bits`, `sink_length`, ...) as
            keyword arguments.
        cache_config: all of them in one; not together with single fields. Without any, the cache is as the model's
            `WSVDConfig.cache` says, or in the model's dtype.
        max_cache_len: tokens to allocate at fixed addresses (for compiled decoding); None grows as needed.
        offloading: keep all layers but the current one on the CPU (CUDA models).

    Attributes:
        input_ids: of a loaded cache, the token ids that were saved with it; else None.

    Raises:
        ValueError: an encoder-decoder model, options that do not fit each other or the model (a guard map of another
            one, `text_bits` for one that reads text alone), or `max_cache_len` that is not a positive number.

    Example:
        `model.generate(**inputs, past_key_values=WSVDCache(model, bits=4))` (`cache=` since transformers 5.24)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bits: int | None = None,
        *,
        cache_config: CacheConfig | dict[str, Any] | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        **fields: Any,
    ):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"WSVDCache: model must be a transformers model, got {type(model).__name__}")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"WSVDCache: {type(model).__name__} is an encoder-decoder model, whose cross attention this cache "
                "does not hold; use the cache of transformers"
            )
        own = own_cache_class(model)
        if own is not None:
            raise ValueError(f"WSVDCache: {type(model).__name__} takes no cache but its own {own.__name__}")
        counts = isinstance(max_cache_len, int) and not isinstance(max_cache_len, bool) and max_cache_len > 0
        if max_cache_len is not None and not counts:
            raise ValueError(
                f"WSVDCache: max_cache_len={max_cache_len!r} is not allowed; allowed: at least 1, or None"
            )
        self.cache_config = settled_config(model, cache_config, {"bits": bits, **fields})
        check_classes(model, self.cache_config)
        config = model.config.get_text_config(decoder=True)
        stock = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
        layers = stored_layers(model, stock.layers, self.cache_config)
        if max_cache_len is not None:
            mask_prompts_alone(layers)
        super().__init__(layers=layers, offloading=offloading)
        if self.cache_config.by_class:
            watch_image_tokens(model)
        if any(isinstance(layer, StoredMixin) and not isinstance(layer, LatentMixin) for layer in self.layers):
            bind_packed(model)
        install_prefill_hook(model)
        self._model = ModelReference(model)
        self.input_ids: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache keeps allocated, as `cache_nbytes` counts them."""
        return cache_nbytes(self)

    def memory_report(self) -> MemoryReport:
        """What `nbytes` consists of, by layer and by kind."""
        return memory_report(self)

    def save(self, path: str | PathLike[str], input_ids: Tensor | None = None) -> None:
        """Write the cache, packed as it is, as one safetensors file; whole or not at all.

        Whoever has the file can read the prompt out of it. What a model keeps of a prompt outside of its cache (the
        position offsets of Qwen2-VL after an image) is not in it.

        Args:
            input_ids: `[batch, at least the cache's length]`, the tokens so far, which `generate` wants again.

        Raises:
            ValueError: a fixed size, offloading, or a layer without keys and values (linear attention), named with
                its number; a model that is gone; input_ids that do not fit.
            OSError: the file cannot be written.
        """
        from .cache_file import save_cache

        save_cache(self, path, input_ids)

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: PreTrainedModel, device: torch.device | str | None = None
    ) -> WSVDCache:
        """Read a file of `save`. The cache goes on exactly as the saved one would have, in the saved storage.

        The file is checked and not trusted. A token may read as NaN, as in any cache.

        Args:
            model: the one that the cache was made with. Its dtype may be another of float32 and bfloat16: tokens kept
                whole are cast.
            device: of all layers; None: that of each layer's weights.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: naming the file and the cause: truncated, damaged, another model (shape, config, ranks, layouts
                or weights).
        """
        from .cache_loading import load_cache

        return load_cache(cls, path, model, device)


def settled_config(
    model: PreTrainedModel, cache_config: CacheConfig | dict[str, Any] | None, fields: dict[str, Any]
) -> CacheConfig:
    """The one config that the arguments of `WSVDCache` describe; without any, that of the model."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if cache_config is not None:
        if fields:
            raise ValueError(f"WSVDCache: cache_config and {sorted(fields)} are both given: leave one out")
        return CacheConfig.parse(cache_config)
    if fields:
        return CacheConfig.parse(fields)
    return model_cache_config(model) or CacheConfig()


def model_cache_config(model: PreTrainedModel) -> CacheConfig | None:
    """The storage that a model of ours is configured for."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return config.storage if isinstance(config, WSVDConfig) else None


def check_classes(model: PreTrainedModel, cache_config: CacheConfig) -> None:
    """ValueError for a guard map of another model, and for token classes in a model that reads text alone."""
    guard_map = cache_config.guard_map
    if guard_map is not None:
        guard_map.check_fits(key_value_heads(model), type(model).__name__)
    if cache_config.by_class and not reads_images(model):
        field, allowed = "text_bits", "None"
        if cache_config.text_bits is None:
            field, allowed = "guard_map.tokens", "'all'"
        raise ValueError(
            f"WSVDCache: {field} tells tokens of images from others, but {type(model).__name__} reads text alone; "
            f"allowed: {allowed}"
        )


def stored_layers(
    model: PreTrainedModel, stock: list[CacheLayerMixin], cache_config: CacheConfig
) -> list[CacheLayerMixin]:
    """The layers of an empty stock cache of `model`, replaced by ours wherever they hold keys and values.

    Raises:
        ValueError: storage that a layer cannot have.
    """
    latent = bound_layers(model)
    modules = {attention.layer: attention.module for attention in decoder_attentions(model)}
    layers, packed, untouched = [], [], []
    for number, layer in enumerate(stock):
        storage = cache_config.storage(number, len(stock), number in latent)
        if number in latent:
            storage = narrowed(storage, modules[number])
        new = upgraded(layer, number in latent, storage)
        if not storage.whole:
            if new is not None:
                packed.append(number)
            elif isinstance(layer, CacheLayerMixin):
                untouched.append(number)
        layers.append(new or layer)
    check_widths(model, layers)
    kinds = sorted({type(layer).__name__ for layer in layers})
    wanted = any(not cache_config.storage(number, len(stock), False).whole for number in range(len(stock)))
    if wanted and not packed:
        raise ValueError(f"WSVDCache: no layer of {type(model).__name__} can be packed ({', '.join(kinds)})")
    if untouched:
        kinds = sorted({type(stock[number]).__name__ for number in untouched})
        logger.warning(f"hf_wsvd: decoder layers {untouched} keep the model's dtype: {', '.join(kinds)} is not packed")
    return layers


def check_widths(model: PreTrainedModel, layers: list[CacheLayerMixin]) -> None:
    """ValueError now rather than at the first token, for group sizes and heads that do not fit a layer."""
    for attention in decoder_attentions(model):
        layer = layers[attention.layer] if attention.layer < len(layers) else None
        storage: LayerStorage | None = getattr(layer, "storage", None)
        if storage is None:
            continue
        for side in ("key", "value"):
            projection = getattr(attention.module, f"{side[0]}_proj")
            width = projection.width if isinstance(layer, LatentMixin) else attention.head_dim
            make_store(getattr(storage, side), side, attention.heads, width, projection.weight.dtype)


def cache_nbytes(cache: Cache) -> int:
    """Bytes of memory that a cache keeps allocated: payload, growth slack, rotary rows, scales and windows.

    Works for any transformers cache. Storage shared by several tensors is counted once.
    """
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in allocations(layer):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
