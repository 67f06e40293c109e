"""What a guard map comes to: heads by layer, and the bytes that an image's tokens take with it and without."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ..estimate import estimate_memory
from ..quantizer_config import CacheConfig, GuardMap
from ..quantizer_config.guard_map import SIDES


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
        f"{facts['protect']}; selector: {printed(facts['selector'])}"
    ]
    source = guard_map.info.get("calibration")
    if isinstance(source, dict) and source:
        facts_of = [f"{name} {source[name]}" for name in ("dataset", "split", "seed", "samples") if name in source]
        lines.append(f"chosen on: {printed(', '.join(facts_of), 160) if facts_of else 'not recorded'}")
    for layer in range(len(guard_map.num_key_value_heads)):
        sides = [(side, facts[side].get(str(layer))) for side in SIDES]
        named = [f"{side}s of heads {', '.join(map(str, heads))}" for side, heads in sides if heads]
        if named:
            lines.append(f"layer {layer}: {'; '.join(named)}")
    return lines


def printed(text: str | None, most: int = 60) -> str:
    """A checkpoint's text as one short line, without what a terminal would take for a command."""
    return "not recorded" if text is None else "".join(c if c.isprintable() else "?" for c in text)[:most]


def overlap(guard_map: GuardMap, other: GuardMap) -> float:
    """Share of the guarded heads that another map guards too; 1.0 where none is guarded."""
    here, there = ({(guard.layer, guard.head) for guard in each} for each in (guard_map, other))
    return len(here & there) / len(here) if here else 1.0


def image_bytes_per_token(model: PreTrainedModel | PretrainedConfig, cache: CacheConfig, tokens: int = 512) -> float:
    """Bytes that one token of an image takes in all layers of a packed cache of `model`, scales and windows included.

    Args:
        model: dense or compressed, or its config.
        cache: with a guard map or without.
        tokens: of the image; windows of KIVI and constants of a scheme count in proportion.
    """
    return estimate_memory(model, tokens, cache_config=cache, image_tokens=tokens).cache_bytes / tokens


def without_guards(cache: CacheConfig) -> CacheConfig:
    """The same cache with no guarded head; text tokens keep their bits."""
    text_bits = 16 if cache.text_bits is None and cache.by_class else cache.text_bits
    return dataclasses.replace(cache, guard_map=None, text_bits=text_bits)
