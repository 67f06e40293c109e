"""Heads of which only the first channels are kept: beside heads of full rank, latents of lower rank end in zeros."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ..image_tokens import ImageTokens
from ..quantizer_config import LayerStorage, StorageSpec
from .composite import CompositeStore
from .heads import SplitHeadsStore
from .runs import Run
from .store import Store


class NarrowStore(CompositeStore):
    """Tokens whose channels from some number on are zero.

    Args:
        inner: an empty store for the channels before.
        width: of the tokens.
    """

    def __init__(self, inner: Store, width: int):
        self.heads, self.width, self.dtype = inner.heads, width, inner.dtype
        self.inner = inner
        self.parts = {"narrow": inner}

    def __len__(self) -> int:
        return len(self.inner)

    def append(self, tokens: Tensor) -> None:
        self.inner.append(tokens[..., : self.inner.width])

    def append_marked(self, tokens: Tensor, image_tokens: ImageTokens) -> None:
        self.inner.append_marked(tokens[..., : self.inner.width], image_tokens)

    def read(self) -> Tensor:
        return F.pad(self.inner.read(), (0, self.width - self.inner.width))

    def read_into(self, out: Tensor) -> None:
        self.inner.read_into(out[..., : self.inner.width])
        out[..., self.inner.width :] = 0

    def read_heads(self, heads: slice) -> Tensor:
        return F.pad(self.inner.read_heads(heads), (0, self.width - self.inner.width))

    def runs(self) -> list[Run]:
        return self.inner.runs()  # narrower than the tokens: what expands them has its last columns for zeros

    def crop(self, count: int) -> None:
        self.inner.crop(count)

    def keep_last(self, count: int) -> None:
        self.inner.keep_last(count)


def with_narrow_heads(
    spec: StorageSpec, heads: int, width: int, build: Callable[[StorageSpec, int, int], Store]
) -> Store:
    """A store of heads in all their channels and others that end in zeros.

    Args:
        spec: with a `width` of its own.
        build: makes the store of a spec for so many heads of such a width.
    """
    wide, rest = list(spec.wide_heads), [head for head in range(heads) if head not in spec.wide_heads]
    first = build(spec_of_heads(spec, wide), len(wide), width)
    narrow = NarrowStore(build(spec_of_heads(spec, rest), len(rest), spec.width), width)
    return SplitHeadsStore(spec.wide_heads, first, narrow)


def narrowed(storage: LayerStorage, attention: nn.Module) -> LayerStorage:
    """Storage of a layer's latents, of which heads that are cut beside full ones take no more than their rank."""
    return storage._replace(
        key=narrow_spec(storage.key, attention.k_proj), value=narrow_spec(storage.value, attention.v_proj)
    )


def narrow_spec(spec: StorageSpec, projection: nn.Module) -> StorageSpec:
    """One side of it; `projection` is a `LatentProjection`."""
    if not projection.full_heads or projection.up is None:
        return spec
    return spec._replace(width=projection.rank, wide_heads=projection.full_heads)


def spec_of_heads(spec: StorageSpec, heads: list[int]) -> StorageSpec:
    """What a spec says of some of its heads, renumbered from 0, in all their channels."""
    number = {head: place for place, head in enumerate(heads)}
    kept = ((guard, tuple(number[head] for head in guarded if head in number)) for guard, guarded in spec.guards)
    return spec._replace(
        whole_heads=tuple(number[head] for head in spec.whole_heads if head in number),
        text=None if spec.text is None else spec_of_heads(spec.text, heads),
        guards=tuple((guard, guarded) for guard, guarded in kept if guarded),
        width=None,
        wide_heads=(),
    )
