"""From ratios and explicit ranks to one rank for every decoder layer's K and V."""

from __future__ import annotations

from typing import Any

from .checks import fail
from .config import WSVDConfig


def rank_for_ratio(ratio: float, head_dim: int, multiple: int) -> int:
    """Largest allowed rank whose cache is at most `ratio` of the dense one; a ratio of 1 keeps the whole head."""
    if ratio == 1:
        return head_dim
    # The small addend undoes binary rounding: 0.3 * 10 must give 3.
    rank = int(ratio * head_dim + 1e-9)
    return max(rank - rank % multiple if rank >= multiple else rank, 1)


def rank_for_parameters(ratio: float, in_features: int, head_dim: int) -> int:
    """Largest rank whose factors hold at most `ratio` of a head's parameters; a ratio of 1 keeps the whole head."""
    if ratio == 1:
        return head_dim
    return max(int(ratio * in_features * head_dim / (in_features + head_dim) + 1e-9), 1)


def allocated_by_gradient(config: WSVDConfig, side: str) -> str | None:
    """Name of the ratio whose bytes are allocated to K's or V's ranks; None where their ranks are given."""
    own = f"{side}_rank_ratio"
    name = own if getattr(config, own) is not None else "rank_ratio"
    given = getattr(config, f"{side}_rank") is not None or not isinstance(getattr(config, name), int | float)
    return None if given or config.rank_allocation != "gradient" else name


def resolve_ranks(
    config: WSVDConfig, side: str, head_dims: list[int | None], in_features: int | None = None
) -> list[int | None]:
    """Rank of every decoder layer's Q, K or V heads (`side` "q", "k" or "v"), all layers alike.

    Args:
        head_dims: One entry a decoder layer, None where the layer cannot be converted.
        in_features: Inputs of the query projections, which `q_rank_ratio` needs.

    Returns:
        One entry a layer: None (untouched) or a rank from 1 to `head_dim`.

    Raises:
        ValueError: a list of another length than the decoder has layers, a rank above `head_dim`, or a layer number
            that the decoder does not have.
    """
    count = len(head_dims)
    skipped = set(config.layers_to_not_convert or ())
    for layer in skipped:
        if layer >= count:
            fail("layers_to_not_convert", layer, f"decoder layer numbers from 0 to {count - 1}")
    explicit = getattr(config, f"{side}_rank")
    own = f"{side}_rank_ratio"
    ratio_field = own if side == "q" or getattr(config, own) is not None else "rank_ratio"
    field = f"{side}_rank" if explicit is not None else ratio_field
    values = _per_layer(field, getattr(config, field), count)
    ranks: list[int | None] = []
    for layer, (value, head_dim) in enumerate(zip(values, head_dims)):
        if value is None or head_dim is None or layer in skipped:
            ranks.append(None)
        elif explicit is None and side == "q":
            ranks.append(rank_for_parameters(value, in_features, head_dim))
        elif explicit is None:
            ranks.append(rank_for_ratio(value, head_dim, config.rank_multiple))
        elif value > head_dim:
            fail(field, value, f"an integer from 1 to head_dim = {head_dim} (layer {layer})")
        else:
            ranks.append(value)
    return ranks


def _per_layer(field: str, value: Any, count: int) -> list:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        fail(field, f"a list of {len(value)}", f"a list of {count}, one entry a decoder layer, or a single value")
    return list(value)
