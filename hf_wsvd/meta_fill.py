"""Caches of a model on the meta device, filled to any length at the price of a short prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .cache_layers import StoredMixin
from .call import LatentCall, active_call
from .compat import CACHE_ARGUMENT
from .decoder import decoder_of
from .image_tokens import TEXT_ONLY, ImageTokens, told
from .latent_layers import LatentMixin
from .storage import Codec, Packed, Store


# Enough for the convolutions of linear attention to fill their states; some loop over the tokens of a prompt.
PROMPT_TOKENS = 16
WRAPPED = ("update", "update_indexer", "new_store")


@torch.no_grad()
def fill(model: PreTrainedModel, cache: Cache, tokens: int, batch: int, image_tokens: int = 0) -> None:
    """Give every layer of `cache` that many more tokens of each sequence, as one call of the model would.

    A short prompt runs through the decoder; each layer puts tokens of the same kind, in full number, in place of its
    own. What a layer keeps at any length (states of linear attention) is thus right too.

    Args:
        model: on the meta device.
        cache: a new one, or one that this function has filled.
        image_tokens: how many of the tokens are of images, the first ones of every sequence.

    Raises:
        ValueError: a model whose forward looks at values, which tensors of the meta device have not.
    """
    length = min(tokens, PROMPT_TOKENS)
    coded: dict[tuple, Packed] = {}
    for layer in cache.layers:
        if not hasattr(layer, "get_mask_sizes"):  # linear attention alone, or another layer's keys and values
            continue
        visible = layer.get_mask_sizes(length)[0]
        layer.update = partial(stretched, layer, layer.update, tokens, visible)
        if hasattr(layer, "update_indexer"):
            layer.update_indexer = partial(stretched_indexer, layer.update_indexer, tokens, visible)
        if isinstance(layer, StoredMixin):
            layer.new_store = partial(quick_store, layer, layer.new_store, coded)
    inputs = torch.zeros(batch, length, dtype=torch.long, device="meta")
    runs = [(True, 0, image_tokens), (False, image_tokens, tokens)]
    classes = ImageTokens.of_rows_alike([run for run in runs if run[1] < run[2]]) if image_tokens else TEXT_ONLY
    try:
        with told(classes):
            decoder_of(model)(input_ids=inputs, use_cache=True, **{CACHE_ARGUMENT: cache})
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot run without weights ({str(error).splitlines()[0]}): fill a cache of the "
            "loaded model and see its memory_report()"
        ) from error
    finally:
        for layer in cache.layers:
            for name in WRAPPED:
                vars(layer).pop(name, None)


def stretched(
    layer: CacheLayerMixin,
    update: Callable,
    tokens: int,
    visible: int,
    keys: Tensor,
    values: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`layer.update` with `tokens` tokens in place of those given.

    Args:
        visible: columns of the mask, and so the tokens that attention is to get.
    """
    call = active_call()
    if isinstance(layer, LatentMixin) and isinstance(call, LatentCall):
        call.key = call.key._replace(latent=of_length(call.key.latent, tokens))
        call.value = call.value._replace(latent=of_length(call.value.latent, tokens))
        if call.cos is not None:  # `generate` gives every sequence its own positions
            shape = (keys.shape[0], tokens, call.cos.shape[-1])
            call.cos, call.sin = call.cos.new_empty(shape), call.sin.new_empty(shape)
    update(of_length(keys, tokens), of_length(values, tokens), *args, **kwargs)
    seen = of_length(keys, visible), of_length(values, visible)
    if isinstance(call, LatentCall) and call.handed is not None:
        call.handed = seen
    return seen


def stretched_indexer(update: Callable, tokens: int, visible: int, keys: Tensor) -> Tensor:
    """The same for the index keys `[B, S, width]` of sparse attention."""
    update(of_length(keys, tokens))
    return of_length(keys, visible)


def of_length(tokens: Tensor, count: int) -> Tensor:
    """An empty tensor like `tokens [..., S, width]` with `count` of them."""
    return tokens.new_empty((*tokens.shape[:-2], count, tokens.shape[-1]))


def quick_store(
    layer: StoredMixin, new_store: Callable, coded: dict[tuple, Packed], side: str, tokens: Tensor
) -> Store:
    """`layer.new_store` whose codecs work out the form of like tokens once for all layers: it takes milliseconds."""
    store = new_store(side, tokens)
    parts = [store]
    for part in parts:
        parts.extend(getattr(part, "parts", {}).values())
        codec = getattr(part, "codec", None)
        if codec is not None:
            codec.encode = partial(encoded_once, codec, codec.encode, coded, getattr(layer.storage, side))
    return store


def encoded_once(codec: Codec, encode: Callable, coded: dict[tuple, Packed], spec: tuple, tokens: Tensor) -> Packed:
    """What `encode` gives for tokens of this shape and storage, in tensors of their own."""
    key = (settings_of(codec), spec, tokens.shape, tokens.dtype)
    if key not in coded:
        packed = encode(tokens)
        if codec.state:  # it remembers something of its tokens, which every layer has to do for itself
            return packed
        coded[key] = packed
    return Packed(*(torch.empty_like(part) for part in coded[key]))


def settings_of(codec: Codec) -> tuple:
    """What tells codecs apart: parts of one store may have several of one kind."""
    numbers = tuple((name, value) for name, value in vars(codec).items() if isinstance(value, int | torch.dtype))
    return (type(codec), numbers, *(settings_of(part) for part in vars(codec).values() if isinstance(part, Codec)))
