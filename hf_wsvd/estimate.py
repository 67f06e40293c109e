"""How much memory a model and its cache take at a length, without its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel

from .cache import WSVDCache, cache_nbytes
from .memory_report import MemoryReport, memory_report, stores_of
from .meta_fill import fill
from .meta_model import MetaModel
from .quantizer_config import CacheConfig, LowPrecisionConfig
from .static_layers import PackedStaticMixin
from .storage import Store


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model and of its cache; `print` shows them.

    Attributes:
        tokens, batch: what the cache holds, tokens of each sequence.
        dtype: of the weights, and of what the cache keeps as it is.
        weights_bytes: parameters and buffers; None for checkpoints that another method has quantized.
        cache_bytes: what `WSVDCache(...).nbytes` would be.
        dense_cache_bytes: the same of a `DynamicCache` over dense keys and values.
        bits_per_element: bits that the cache spends on each number that it keeps (of a latent or a dense head), scales
            and windows included; rotary rows, states of linear attention and spare memory are left out.
        report: `cache_bytes` by layer and kind.
    """

    tokens: int
    batch: int
    dtype: str
    weights_bytes: int | None
    cache_bytes: int
    dense_cache_bytes: int
    bits_per_element: float
    report: MemoryReport

    @property
    def total(self) -> int | None:
        """Weights and cache; None where the weights are unknown."""
        return None if self.weights_bytes is None else self.weights_bytes + self.cache_bytes

    @property
    def share_of_dense(self) -> float:
        """The cache over a dense one."""
        return self.cache_bytes / self.dense_cache_bytes if self.dense_cache_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the derived numbers."""
        derived = {"total": self.total, "share_of_dense": self.share_of_dense, "report": self.report.to_dict()}
        return {**vars(self), **derived}

    def __str__(self) -> str:
        weights = "unknown" if self.weights_bytes is None else human_bytes(self.weights_bytes)
        total = "" if self.total is None else f", {human_bytes(self.total)} in all"
        return (
            f"{self.batch} x {self.tokens:,} tokens in {self.dtype}: cache {human_bytes(self.cache_bytes)} "
            f"({self.share_of_dense:.1%} of dense, {self.bits_per_element:.2f} bits an element), weights {weights}"
            f"{total}"
        )


def estimate_memory(
    model: PreTrainedModel | PretrainedConfig | str | os.PathLike[str],
    tokens: int,
    batch: int = 1,
    bits: int | None = None,
    *,
    cache_config: CacheConfig | dict[str, Any] | None = None,
    max_cache_len: int | None = None,
    rank_ratio: float | None = None,
    low_precision: LowPrecisionConfig | dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    decoding: bool = False,
    image_tokens: int | None = None,
    revision: str | None = None,
    **fields: Any,
) -> MemoryEstimate:
    """What a model and its cache take, from the config alone: nothing is loaded, nothing of that size allocated.

    The cache is filled as a real one on the meta device, and its bytes are those of `WSVDCache.nbytes` in `generate`.
    Activations and what an allocator keeps beside them are not in it.

    Args:
        model: a loaded model (dense or compressed), a config, or the folder or Hub id of a checkpoint.
        tokens: that the cache holds of each sequence.
        batch: sequences.
        bits, cache_config, fields, max_cache_len: as for `WSVDCache`.
        rank_ratio: what if a dense model were compressed to this share of `head_dim`.
        low_precision: what if its weights were quantized so.
        dtype: of the weights; None: that of the model or config, else bfloat16.
        decoding: False: right after a prompt of `tokens`, when little memory is spare; True: after one of `tokens - 1`
            and a token more, with up to 1/64 spare for the next.
        image_tokens: of `tokens`, where the cache keeps tokens of images otherwise than those of text; needed there.
            They count as of rows that are alike; a batch with images in other places in every row also keeps a map
            and a few spare slots.
        revision: of a Hub repository.

    Raises:
        ValueError: options that are not allowed, or do not fit the model; a model that cannot run without weights, or
            is no decoder.
        OSError: no config to be found.
    """
    check_counts(tokens, batch, max_cache_len, decoding)
    meta = MetaModel(model, dtype=dtype, rank_ratio=rank_ratio, low_precision=low_precision, revision=revision)
    options = {"bits": bits, "cache_config": cache_config, "max_cache_len": max_cache_len, **fields}
    return estimate_on(meta, tokens, batch, decoding, options, image_tokens=image_tokens)


def estimate_on(
    meta: MetaModel,
    tokens: int,
    batch: int,
    decoding: bool,
    options: dict[str, Any],
    dense_cache_bytes: int | None = None,
    image_tokens: int | None = None,
) -> MemoryEstimate:
    """`estimate_memory` for a model that is there already; `options` are those of `WSVDCache`.

    Args:
        dense_cache_bytes: `dense_bytes` of the same, where known.
        image_tokens: as of `estimate_memory`.
    """
    if meta.config is not None and all(options.get(name) is None for name in options if name != "max_cache_len"):
        options = {**options, "cache_config": meta.config.storage}
    meta.bind()
    cache = WSVDCache(meta.model, **options)
    check_image_tokens(image_tokens, tokens - decoding, cache.cache_config)
    bring_to(meta, cache, tokens, batch, decoding, image_tokens or 0)
    settle_lengths(cache, tokens, image_tokens or 0)
    report = memory_report(cache)
    kept = sum(report.sum(kind) for kind in ("payload", "scales", "window", "places", "constants"))
    return MemoryEstimate(
        tokens=tokens,
        batch=batch,
        dtype=str(meta.dtype).removeprefix("torch."),
        weights_bytes=meta.weights_bytes,
        cache_bytes=report.total,
        dense_cache_bytes=dense_cache_bytes or dense_bytes(meta, tokens, batch, decoding),
        bits_per_element=8 * kept / max(1, elements(cache)),
        report=report,
    )


def dense_bytes(meta: MetaModel, tokens: int, batch: int, decoding: bool) -> int:
    """Bytes of a `DynamicCache` over dense keys and values; a compressed model makes those too."""
    meta.unbind()
    cache = DynamicCache(config=meta.model.config.get_text_config(decoder=True))
    bring_to(meta, cache, tokens, batch, decoding)
    return cache_nbytes(cache)


def bring_to(meta: MetaModel, cache: Cache, tokens: int, batch: int, decoding: bool, image_tokens: int = 0) -> None:
    """Bring an empty cache to `tokens`."""
    fill(meta.model, cache, tokens - decoding, batch, image_tokens)
    if decoding:
        fill(meta.model, cache, 1, batch)


def settle_lengths(cache: Cache, tokens: int, image_tokens: int) -> None:
    """Let packed static layers know how long they are: their lengths are tensors, which have no values on meta."""
    for layer in cache.layers:
        if isinstance(layer, PackedStaticMixin):
            for store in stores_of(layer):
                settle(store, tokens, image_tokens)


def settle(store: Store, tokens: int, image_tokens: int) -> None:
    """The same for a store."""
    if hasattr(store, "layer"):
        store.layer.cumulative_length = torch.tensor(tokens)
    by_class = {"image": image_tokens, "text": tokens - image_tokens}
    for name, part in getattr(store, "parts", {}).items():
        settle(part, by_class.get(name, tokens), image_tokens)


def elements(cache: Cache) -> int:
    """Numbers that a cache keeps as keys and values, or latents of them."""
    count = 0
    for layer in cache.layers:
        for store in stores_of(layer):
            length = len(store)
            if isinstance(layer, PackedStaticMixin):
                length = min(length, layer.max_cache_len)
            count += store.batch * store.heads * length * store.width
        if not stores_of(layer) and getattr(layer, "keys", None) is not None:
            count += layer.keys.numel() + layer.values.numel()
    return count


def check_counts(tokens: int, batch: int, max_cache_len: int | None, decoding: bool) -> None:
    """ValueError naming the argument that is not allowed."""
    for name, value, least in (("tokens", tokens, 1 + decoding), ("batch", batch, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: at least {least}")
    if isinstance(max_cache_len, int) and tokens > max_cache_len:
        raise ValueError(f"tokens={tokens} is not allowed; allowed: at most max_cache_len={max_cache_len}")


def check_image_tokens(image_tokens: int | None, prompt_tokens: int, cache_config: CacheConfig) -> None:
    """ValueError unless it is known how many tokens of the prompt are of images, where that matters."""
    if image_tokens is None and not cache_config.by_class:
        return
    if isinstance(image_tokens, bool) or not isinstance(image_tokens, int) or not 0 <= image_tokens <= prompt_tokens:
        why = " (this cache keeps tokens of images otherwise than others)" if image_tokens is None else ""
        raise ValueError(
            f"image_tokens={image_tokens!r} is not allowed; allowed: a number from 0 to {prompt_tokens}{why}"
        )


def human_bytes(count: int) -> str:
    """ "1.25 GiB", in the largest unit of which there is at least one."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
