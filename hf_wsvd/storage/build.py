"""From a `StorageSpec` to an empty store."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import StaticLayer

from ..quantizer_config import KIVI_GROUP_SIZE, StorageSpec
from .codec import Codec
from .float16 import CastCodec
from .heads import SplitHeadsStore
from .kivi import KiviKeyStore
from .narrow import with_narrow_heads
from .packed import PackedStore
from .registry import make_codec
from .static import StaticStore
from .store import Store
from .whole import WholeStore
from .window import WindowStore


def make_store(spec: StorageSpec, side: str, heads: int, width: int, dtype: torch.dtype) -> Store:
    """An empty store that grows.

    Args:
        spec: what to keep tokens in.
        side: "key" or "value"; KIVI treats them differently.
        heads, width, dtype: of the tokens.

    Raises:
        ValueError: a group size that does not divide the width, or a head that the layer does not have.
    """
    check_heads(spec, heads)
    if spec.width is not None:
        return with_narrow_heads(spec, heads, width, lambda part, *size: make_store(part, side, *size, dtype))
    if spec.scheme is None or len(spec.whole_heads) == heads:
        return WholeStore(heads, width, dtype)
    if spec.whole_heads:
        count = len(spec.whole_heads)
        rest = make_store(spec._replace(whole_heads=()), side, heads - count, width, dtype)
        return SplitHeadsStore(spec.whole_heads, WholeStore(count, width, dtype), rest)
    residual_length = spec.residual_length
    if spec.scheme == "kivi" and side == "key":
        group_size = spec.group_size or KIVI_GROUP_SIZE
        store = KiviKeyStore(spec.bits, group_size, residual_length, heads, width, dtype)
        residual_length = 0  # it has its own
    else:
        store = PackedStore(codec_for(spec, width), heads, dtype)
    if spec.sink_length or residual_length:
        store = WindowStore(store, spec.sink_length, residual_length)
    return store


def make_static_store(
    spec: StorageSpec, heads: int, width: int, dtype: torch.dtype, new_layer: Callable[[], StaticLayer]
) -> Store:
    """An empty store of fixed size; `new_layer()` gives a static layer of transformers with the right limits.

    Raises:
        ValueError: as `make_store`, and for storage whose parts change their size (`check_static`).
    """
    check_heads(spec, heads)
    check_static(spec)
    if spec.width is not None:
        return with_narrow_heads(
            spec, heads, width, lambda part, *size: make_static_store(part, *size, dtype, new_layer)
        )
    if spec.scheme is None or len(spec.whole_heads) == heads:
        return StaticStore(CastCodec(width, dtype), new_layer(), heads, dtype)
    rest = StaticStore(codec_for(spec, width), new_layer(), heads - len(spec.whole_heads), dtype)
    if not spec.whole_heads:
        return rest
    whole = StaticStore(CastCodec(width, dtype), new_layer(), len(spec.whole_heads), dtype)
    return SplitHeadsStore(spec.whole_heads, whole, rest)


def codec_for(spec: StorageSpec, width: int) -> Codec:
    """The token-wise codec of a spec. KIVI's values are min-max codes in groups of channels."""
    if spec.scheme != "kivi":
        return make_codec(spec, width)
    group_size = spec.group_size
    if group_size is None:
        group_size = next(size for size in range(min(KIVI_GROUP_SIZE, width), 0, -1) if width % size == 0)
    return make_codec(spec._replace(scheme="minmax", group_size=group_size), width)


def check_heads(spec: StorageSpec, heads: int) -> None:
    """ValueError for a head that the layer does not have."""
    if spec.whole_heads and spec.whole_heads[-1] >= heads:
        raise ValueError(
            f"CacheConfig: skip_heads={list(spec.whole_heads)} is not allowed; allowed: KV heads from 0 to {heads - 1}"
        )


def check_static(spec: StorageSpec) -> None:
    """ValueError for storage that cannot have a fixed size."""
    if spec.scheme is not None and (spec.scheme == "kivi" or spec.sink_length or spec.residual_length):
        raise ValueError(
            f"a cache of fixed size cannot keep windows in full precision (scheme={spec.scheme!r}, sink_length="
            f"{spec.sink_length}, residual_length={spec.residual_length}): leave out max_cache_len, or choose storage "
            "without windows"
        )
