"""A prompt in a cache of the package, whose kept tokens can stand anywhere between exact and packed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..attention import bound_layers
from ..cache import WSVDCache
from ..compat import CACHE_ARGUMENT
from ..image_tokens import ImageTokens
from ..quantizer_config import CacheConfig, GuardMap, LayerStorage, StorageSpec
from ..quantizer_config.guard_map import SIDES
from ..storage import make_store
from .scoring import ScoringTask


Weights = dict[str, dict[int, Tensor]]  # by side and decoder layer, `[heads]`


def storages_of(task: ScoringTask) -> dict[int, LayerStorage]:
    """How the cache of a task keeps each layer with keys of its own, if every head is guarded at `config.bits`.

    Raises:
        ValueError: a cache that packs nothing.
    """
    counts, latent = task.num_key_value_heads, bound_layers(task.model)
    layers = [attention.layer for attention in task.attentions]
    if all(task.cache.storage(layer, len(counts), layer in latent).whole for layer in layers):
        raise ValueError(
            f"selector={task.config.selector!r} needs the packed storage that heads are guarded from: cache="
            "CacheConfig(...) with fewer than 16 bits"
        )
    everyone = {layer: dict.fromkeys(range(heads), task.config.bits) for layer, heads in enumerate(counts) if heads}
    guard_map = GuardMap(everyone, everyone, counts, tokens=task.config.tokens)
    config: CacheConfig = dataclasses.replace(task.cache, guard_map=guard_map)
    return {layer: config.storage(layer, len(counts), layer in latent) for layer in layers}


class StoredPrompt:
    """The first tokens of a batch in an exact cache, and what packing would make of them.

    Args:
        inputs: of the forward over the prompt.
        classes: of the prompt's tokens.
        storages: of `storages_of`.
    """

    @torch.no_grad()
    def __init__(
        self, task: ScoringTask, inputs: dict[str, Any], classes: ImageTokens, storages: dict[int, LayerStorage]
    ):
        self.cache = WSVDCache(task.model, cache_config=CacheConfig())
        task.model(**inputs, use_cache=True, **{CACHE_ARGUMENT: self.cache})
        # By layer and side: what guarding adds to the exact tokens (None for nothing), and what comes on top of it for
        # heads that are not guarded. `[B, H, S, width]`, of latents where the cache holds latents.
        self.differences: dict[tuple[int, str], tuple[Tensor | None, Tensor]] = {}
        for layer, storage in storages.items():
            for side, held in zip(SIDES, self.cache.layers[layer].stores()):
                spec, exact = getattr(storage, side), held.read()
                # A sliding layer holds the newest tokens alone.
                classes_held = newest(classes, exact.shape[2])
                guarded = None if reads_exactly(spec) else stored(spec, side, exact, classes_held)
                rest = stored(unguarded(spec), side, exact, classes_held)
                difference = None if guarded is None else guarded - exact
                self.differences[layer, side] = (difference, rest - (exact if guarded is None else guarded))

    def between(self, share: float, weights: Weights) -> WSVDCache:
        """A copy of the cache whose tokens are exact + share * guarding + weight * rest, by head; in the graph."""
        cache = copy.deepcopy(self.cache)
        for (layer, side), (guarding, rest) in self.differences.items():
            store = getattr(cache.layers[layer], f"{side}_store")
            weight = weights[side][layer].to(rest.dtype)[None, :, None, None]
            mixed = store.read() + weight * rest
            store.reset()
            store.append(mixed if guarding is None else mixed + share * guarding)
        return cache


def reads_exactly(spec: StorageSpec) -> bool:
    """Whether a guarded head, text included, reads back as it was; every head is guarded in `spec`."""
    guarded = spec.guards[0][0] if spec.guards else spec
    return guarded.whole and (spec.text is None or reads_exactly(spec.text))


def unguarded(spec: StorageSpec) -> StorageSpec:
    """The same without guards, of text too."""
    return spec._replace(guards=(), text=None if spec.text is None else unguarded(spec.text))


def stored(spec: StorageSpec, side: str, tokens: Tensor, classes: ImageTokens) -> Tensor:
    """What a store reads back of `tokens` `[B, H, S, width]`, in their dtype."""
    store = make_store(spec, side, tokens.shape[1], tokens.shape[3], tokens.dtype)
    store.append_marked(tokens, classes)
    return store.read().to(tokens.dtype)


def newest(classes: ImageTokens, count: int) -> ImageTokens:
    """The classes of the last `count` tokens."""
    return classes if classes.mask is None or count == classes.mask.shape[1] else ImageTokens(classes.mask[:, -count:])
