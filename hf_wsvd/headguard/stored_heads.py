"""What a packed cache would read back of the keys and values that a layer computes, without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import bound_layers
from ..call import key_norms
from ..decoder import DecoderAttention
from ..image_tokens import ImageTokens
from ..kernels import LatentHeads, Rotation, cached_key
from ..quantizer_config import CacheConfig, GuardMap, StorageSpec
from ..quantizer_config.guard_map import SIDES
from ..rope import half_rows
from ..storage import make_store
from .observer import AttentionCall
from .scoring import ScoringTask


class StoredHeads:
    """Differences between what attention would read from the cache of a task and what it reads without one.

    Args:
        task: its `cache` without guards is what is measured; its `config.bits` are those of guarded heads.

    Raises:
        ValueError: a cache that packs nothing or that fits no layer.
    """

    def __init__(self, task: ScoringTask):
        self.task = task
        self.attentions = {attention.layer: attention for attention in task.attentions}
        self.latent = bound_layers(task.model)
        counts = task.num_key_value_heads
        if all(task.cache.storage(layer, len(counts), layer in self.latent).whole for layer in self.attentions):
            raise ValueError(
                f"selector={task.config.selector!r} needs the packed storage that heads are guarded from: cache="
                "CacheConfig(...) with fewer than 16 bits"
            )
        everyone = {
            layer: dict.fromkeys(range(heads), task.config.bits) for layer, heads in enumerate(counts) if heads
        }
        guard_map = GuardMap(everyone, everyone, counts, tokens=task.config.tokens)
        config: CacheConfig = dataclasses.replace(task.cache, guard_map=guard_map)
        self.storages = {layer: config.storage(layer, len(counts), layer in self.latent) for layer in self.attentions}
        self._latents: dict[tuple[int, str], Tensor] = {}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, layers that hold latents leave them, and their rotary rows, for `differences`."""
        with ExitStack() as stack:
            stack.callback(self._rows.clear)
            stack.callback(self._latents.clear)
            for layer in sorted(self.latent):
                module = self.attentions[layer].module
                hook = module.register_forward_pre_hook(partial(self._keep_rows, layer), with_kwargs=True)
                stack.callback(hook.remove)
                for side in SIDES:
                    projection = getattr(module, f"{side[0]}_proj")
                    hook = projection.register_forward_pre_hook(partial(self._keep_latent, (layer, side)))
                    stack.callback(hook.remove)
            yield

    @torch.no_grad()
    def differences(self, call: AttentionCall, classes: ImageTokens) -> dict[str, tuple[Tensor | None, Tensor]]:
        """By side `[B, Hkv, S, D]`: what guarding adds to the exact heads (None for nothing), and what comes on top
        of it for heads that are not guarded."""
        found = {}
        for side, exact in zip(SIDES, (call.key, call.value)):
            spec = getattr(self.storages[call.layer], side)
            tokens = self._latents.pop((call.layer, side), exact)
            rest = self._read(spec._replace(guards=()), call.layer, side, tokens, classes)
            if not spec.guards or spec.guards[0][0].whole:
                found[side] = (None, rest - exact)
            else:
                guarded = self._read(spec, call.layer, side, tokens, classes)
                found[side] = (guarded - exact, rest - guarded)
        return found

    def _read(self, spec: StorageSpec, layer: int, side: str, tokens: Tensor, classes: ImageTokens) -> Tensor:
        """What comes back of `tokens` `[B, Hkv, S, width]` from a store, as attention reads it."""
        store = make_store(spec, side, tokens.shape[1], tokens.shape[3], tokens.dtype)
        store.append_marked(tokens.detach(), classes)
        read = store.read().to(tokens.dtype)
        return self._expanded(self.attentions[layer], side, read) if layer in self.latent else read

    def _expanded(self, attention: DecoderAttention, side: str, latent: Tensor) -> Tensor:
        projection = getattr(attention.module, f"{side[0]}_proj")
        bias = None if projection.bias is None else projection.bias.view(projection.heads, projection.head_dim)
        heads = LatentHeads(latent, projection.up, bias)
        if side == "value":
            return heads.expand()
        layout = attention.module._wsvd.layout
        rotation = None
        if layout.rotation != "none":
            cos, sin = (half_rows(rows, layout.rotation) for rows in self._rows[attention.layer])
            rotation = Rotation(cos, sin, interleaved=layout.rotation != "halves")
        return cached_key(heads, rotation, **key_norms(attention.module, layout))

    def _keep_rows(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module._wsvd.layout.rotation != "none":
            self._rows[layer] = kwargs["position_embeddings"]

    def _keep_latent(self, key: tuple[int, str], projection: nn.Module, args: tuple[Any, ...]) -> None:
        latent = F.linear(args[0].detach(), projection.weight)
        self._latents[key] = latent.unflatten(-1, (projection.heads, projection.rank)).transpose(1, 2)
