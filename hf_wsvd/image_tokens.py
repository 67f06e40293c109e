"""Which tokens of a forward are of images: a cache sees keys and values alone and has to be told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor


class ImageTokens:
    """Token classes of one forward.

    Attributes:
        mask: bool `[B, N]`, true for tokens of images and videos; None where there are none, which costs no look at a
            tensor.
        runs: (is image, start, stop) of the runs of equal class where all rows are alike, else None.
    """

    def __init__(self, mask: Tensor | None = None):
        self.mask = mask
        self.runs: list[tuple[bool, int, int]] | None = None
        if mask is not None and bool((mask == mask[:1]).all()):
            first = mask[0].tolist()
            edges = [0, *(i for i in range(1, len(first)) if first[i] != first[i - 1]), len(first)]
            self.runs = [(first[a], a, b) for a, b in pairwise(edges)]


TEXT_ONLY = ImageTokens()


class _Slot:
    """Holds the classes while dynamo traces, which cannot write thread-local attributes."""

    image_tokens: ImageTokens | None = None


_traced = _Slot()
_local = threading.local()


def current_image_tokens() -> ImageTokens | None:
    """Those of the forward that runs in this thread; None outside of any that was told."""
    if torch.compiler.is_compiling():
        return _traced.image_tokens
    return getattr(_local, "image_tokens", None)


def set_image_tokens(image_tokens: ImageTokens | None) -> None:
    """Open a forward in this thread, or close the open one with None."""
    if torch.compiler.is_compiling():
        _traced.image_tokens = image_tokens
    else:
        _local.image_tokens = image_tokens


@contextmanager
def image_tokens(mask: Tensor) -> Iterator[None]:
    """Tell the caches of forwards inside which of their tokens are of images.

    For forwards that cannot tell by themselves: of a decoder alone, or with `inputs_embeds`. Calls with `input_ids`
    of a vision-language model need it not.

    Args:
        mask: bool `[batch, tokens]` of the forward.

    Raises:
        ValueError: another dtype or rank.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        form = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"image_tokens: mask must be a bool tensor [batch, tokens], got {form}")
    before = current_image_tokens()
    set_image_tokens(ImageTokens(mask))
    try:
        yield
    finally:
        set_image_tokens(before)
