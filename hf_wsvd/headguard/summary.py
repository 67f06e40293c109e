"""What a guard map comes to: heads by layer, and the bytes that an image's tokens take with it and without."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention import bound_layers
from ..decoder import decoder_attentions
from ..quantizer_config import CacheConfig, GuardMap, StorageSpec
from ..quantizer_config.guard_map import SIDES
from ..storage import make_store
from ..storage.narrow import narrowed


IMAGE_TOKENS = 512  # an image, for bytes a token: windows and groups of KIVI are in it


def guard_summary(guard_map: GuardMap) -> dict[str, Any]:
    """JSON-safe facts: selector, tokens, bits, physical heads and guarded ones, guarded heads by layer and side."""
    guarded = {(guard.layer, guard.head) for guard in guard_map}
    by_side = {
        side: {layer: sorted(heads) for layer, heads in getattr(guard_map, side).items() if heads} for side in SIDES
    }
    return {
        "selector": guard_map.selector,
        "tokens": guard_map.tokens,
        "bits": sorted({guard.bits for guard in guard_map}, reverse=True),
        "heads": sum(guard_map.num_key_value_heads),
        "guarded_heads": len(guarded),
        "protect": protected_sides(guard_map),
        **{side: {str(layer): heads for layer, heads in by_side[side].items()} for side in SIDES},
    }


def protected_sides(guard_map: GuardMap) -> str:
    """ "k", "v", "kv" (the same heads), or "k and v apart"."""
    heads = [{layer: set(of) for layer, of in getattr(guard_map, side).items()} for side in SIDES]
    if heads[0] == heads[1]:
        return "kv"
    return "k and v apart" if all(heads) else "k" if heads[0] else "v"


def guard_lines(guard_map: GuardMap) -> list[str]:
    """The summary for people: one line in general, then one for each layer that has guarded heads."""
    facts = guard_summary(guard_map)
    share = facts["guarded_heads"] / max(1, facts["heads"])
    tokens = "all tokens" if facts["tokens"] == "all" else "image tokens"
    bits = " or ".join(map(str, facts["bits"])) or "no"
    lines = [
        f"{facts['guarded_heads']} of {facts['heads']} KV heads ({share:.1%}) keep {bits} bits for {tokens}; sides: "
        f"{facts['protect']}; selector: {facts['selector']}"
    ]
    for layer in range(len(guard_map.num_key_value_heads)):
        sides = [(side, facts[side].get(str(layer))) for side in SIDES]
        named = [f"{side}s of heads {', '.join(map(str, heads))}" for side, heads in sides if heads]
        if named:
            lines.append(f"layer {layer}: {'; '.join(named)}")
    return lines


def overlap(guard_map: GuardMap, other: GuardMap) -> float:
    """Share of the guarded heads that another map guards too; 1.0 where none is guarded."""
    here, there = ({(guard.layer, guard.head) for guard in each} for each in (guard_map, other))
    return len(here & there) / len(here) if here else 1.0


def image_bytes_per_token(model: PreTrainedModel, cache: CacheConfig) -> float:
    """Bytes that one token of an image takes in all layers of a packed cache of `model`, scales included.

    Measured on stores of `IMAGE_TOKENS` tokens of zeros, constants of a scheme and room to grow left out.

    Args:
        model: dense, or compressed and bound.
        cache: with a guard map or without.
    """
    latent, total = bound_layers(model), 0
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for attention in decoder_attentions(model):
        storage = cache.storage(attention.layer, layers, attention.layer in latent)
        if attention.layer in latent:
            storage = narrowed(storage, attention.module)
        for side in SIDES:
            projection = getattr(attention.module, f"{side[0]}_proj")
            width = projection.width if attention.layer in latent else attention.head_dim
            total += bytes_of_images(getattr(storage, side), side, attention.heads, width, projection.weight.dtype)
    return total / IMAGE_TOKENS


def bytes_of_images(spec: StorageSpec, side: str, heads: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of `IMAGE_TOKENS` image tokens of one side of one layer."""
    store = make_store(spec._replace(text=None), side, heads, width, dtype)
    store.append(torch.zeros(1, heads, IMAGE_TOKENS, width, dtype=dtype))
    return sum(piece.used for piece in store.pieces() if piece.kind != "constants")


def without_guards(cache: CacheConfig) -> CacheConfig:
    """The same cache with no guarded head; text tokens keep their bits."""
    text_bits = 16 if cache.text_bits is None and cache.by_class else cache.text_bits
    return dataclasses.replace(cache, guard_map=None, text_bits=text_bits)
