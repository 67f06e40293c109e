"""From a `StorageSpec` to an empty store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers.cache_utils import StaticLayer

from ..quantizer_config import KIVI_GROUP_SIZE, StorageSpec
from .codec import Codec
from .float16 import CastCodec
from .heads import SplitHeadsStore
from .kivi import KiviKeyStore
from .narrow import spec_of_heads, with_narrow_heads
from .packed import PackedStore
from .registry import make_codec
from .static import StaticStore
from .static_classes import StaticTokenClassStore
from .store import Store
from .token_classes import TokenClassStore
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

    def build(part: StorageSpec, count: int, channels: int = width) -> Store:
        return make_store(part, side, count, channels, dtype)

    if spec.width is not None:
        return with_narrow_heads(spec, heads, width, build)
    if spec.whole:
        return WholeStore(heads, width, dtype)
    if has_parts(spec):
        return composed(
            spec, heads, build, lambda *classes: TokenClassStore(*(build(part, heads) for part in classes))
        )
    if spec.scheme is None:
        return WholeStore(heads, width, dtype)
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
    spec: StorageSpec, heads: int, width: int, dtype: torch.dtype, new_layer: Callable[..., StaticLayer]
) -> Store:
    """An empty store of fixed size; `new_layer()` gives a static layer of transformers with the right limits,
    `new_layer(max_cache_len=...)` a shorter one.

    Raises:
        ValueError: as `make_store`, and for storage whose parts change their size (`check_static`).
    """
    check_heads(spec, heads)
    check_static(spec)

    def build(part: StorageSpec, count: int, channels: int = width) -> Store:
        return make_static_store(part, count, channels, dtype, new_layer)

    if spec.width is not None:
        return with_narrow_heads(spec, heads, width, build)
    if has_parts(spec):
        return composed(
            spec, heads, build, partial(static_classes, heads=heads, width=width, dtype=dtype, new_layer=new_layer)
        )
    codec = CastCodec(width, dtype) if spec.scheme is None else codec_for(spec, width)
    return StaticStore(codec, new_layer(), heads, dtype)


def static_classes(
    image: StorageSpec,
    text: StorageSpec,
    heads: int,
    width: int,
    dtype: torch.dtype,
    new_layer: Callable[..., StaticLayer],
) -> StaticTokenClassStore:
    """A store of fixed size for tokens of two classes, which shares out its slots when it knows the first tokens."""

    makers = (partial(static_part, spec, heads, width, dtype, new_layer) for spec in (image, text))
    return StaticTokenClassStore(*makers, new_layer(), heads, width, dtype)


def static_part(
    spec: StorageSpec, heads: int, width: int, dtype: torch.dtype, new_layer: Callable[..., StaticLayer], slots: int
) -> Store:
    """`make_static_store` with so many slots."""
    return make_static_store(spec, heads, width, dtype, partial(new_layer, max_cache_len=slots))


def has_parts(spec: StorageSpec) -> bool:
    """Whether heads or tokens are kept in several forms."""
    return bool(spec.whole_heads or spec.guards) or spec.text is not None


def composed(
    spec: StorageSpec,
    heads: int,
    build: Callable[[StorageSpec, int], Store],
    by_class: Callable[[StorageSpec, StorageSpec], Store],
) -> Store:
    """A store of several parts, the outermost first: whole heads, token classes, guarded heads.

    Args:
        build: makes the store of a spec for so many heads.
        by_class: makes the store of tokens of images and of text, given the specs of both.
    """
    if spec.whole_heads:
        return split_heads("whole", spec.whole_heads, StorageSpec(), spec._replace(whole_heads=()), heads, build)
    if spec.text is not None:
        return by_class(spec._replace(text=None), spec.text)
    (guard, guarded), rest = spec.guards[0], spec._replace(guards=spec.guards[1:])
    if guard == spec._replace(guards=()):
        return build(rest, heads)
    return split_heads("guarded", guarded, guard, rest, heads, build)


def split_heads(
    name: str,
    own: tuple[int, ...],
    own_spec: StorageSpec,
    rest_spec: StorageSpec,
    heads: int,
    build: Callable[[StorageSpec, int], Store],
) -> Store:
    """Heads `own` in one form, all others (of which there may be none) in another."""
    if len(own) == heads:
        return build(own_spec, heads)
    rest = [head for head in range(heads) if head not in own]
    return SplitHeadsStore(own, build(own_spec, len(own)), build(spec_of_heads(rest_spec, rest), len(rest)), name)


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
    for _, guarded in spec.guards:
        if guarded[-1] >= heads:
            raise ValueError(
                f"CacheConfig: guard_map has head {guarded[-1]} where the layer has {heads} KV heads: it was made for "
                "another model"
            )


def check_static(spec: StorageSpec, sliding: bool = False) -> None:
    """ValueError for storage that cannot have a fixed size (`sliding`: of a sliding window)."""
    if spec.text is not None and sliding:
        raise ValueError(
            "a sliding window of fixed size cannot keep tokens of images otherwise than those of text (text_bits, "
            "guard_map): leave out max_cache_len"
        )
    for part in (spec, *(guard for guard, _ in spec.guards)):
        if part.scheme is not None and (part.scheme == "kivi" or part.sink_length or part.residual_length):
            raise ValueError(
                f"a cache of fixed size cannot keep windows in full precision (scheme={part.scheme!r}, sink_length="
                f"{part.sink_length}, residual_length={part.residual_length}): leave out max_cache_len, or choose "
                "storage without windows"
            )
