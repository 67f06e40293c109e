"""The cache of fixed size that a model's generations take one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache import WSVDCache, model_cache_config
from .cache_choice import CacheChoice
from .decoder import decoder_of
from .static_room import check_room


class CacheKeeper:
    """Keeps a cache, and with it the addresses that compiled steps and CUDA graphs were made for.

    One generation has the cache at a time. One that ends by an exception, an interruption by hand included, drops it:
    nobody can tell what is in it.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._kept: tuple[tuple, int, WSVDCache] | None = None

    @property
    def cache(self) -> WSVDCache | None:
        """The cache that is kept; None where there is none, and while a generation has it."""
        return None if self._kept is None else self._kept[2]

    @contextmanager
    def lent(self, model: PreTrainedModel, choice: CacheChoice) -> Iterator[WSVDCache | None]:
        """An empty cache for a generation; None where another one runs.

        Raises:
            ValueError: the device has no room for a new one.
        """
        if not self._running.acquire(blocking=False):
            yield None
            return
        try:
            form = cache_form(model, choice.batch)
            kept, self._kept = self._kept, None
            if kept is not None and kept[0] == form and kept[1] >= choice.tokens:
                tokens, cache = kept[1:]
                cache.reset()
            else:
                kept = None  # its memory is free before that of the new one is taken
                check_room(model, choice)
                tokens, cache = choice.tokens, WSVDCache(model, max_cache_len=choice.tokens)
            yield cache
            self._kept = form, tokens, cache
        finally:
            self._running.release()

    def free(self) -> None:
        """Let go of the cache; a generation that has it keeps it to its end, and the model afterwards."""
        self._kept = None


def cache_form(model: PreTrainedModel, batch: int) -> tuple[Any, ...]:
    """What two generations have in common that can use one cache after the other."""
    return (
        batch,
        model.device,
        model.dtype,
        torch.is_inference_mode_enabled(),
        decoder_of(model).config._attn_implementation,
        model_cache_config(model),
    )
