"""Guarded heads that are not cut at all: their rows of the dense weight in place of low-rank factors."""

from __future__ import annotations

from ..quantizer_config import GuardMap
from .fit import Fit


SIDES = {"k": "key", "v": "value"}


def full_rank_heads(guard_map: GuardMap, side: str, layer: int) -> list[int]:
    """Sorted heads of a layer whose side "k" or "v" is guarded."""
    return sorted(getattr(guard_map, SIDES[side]).get(layer, {}))


def keep_full_rank(fit: Fit, guard_map: GuardMap) -> None:
    """Give guarded heads back what the fit has cut; their other side, and all other heads, stay as they are."""
    for target in fit.targets:
        for side in SIDES:
            projection = getattr(target.attention.module, f"{side}_proj")
            heads = full_rank_heads(guard_map, side, target.attention.layer)
            if heads and projection.rank < projection.head_dim:
                weights = fit.dense_heads(target, side, heads)
                setattr(target.attention.module, f"{side}_proj", projection.with_full_heads(heads, weights))
