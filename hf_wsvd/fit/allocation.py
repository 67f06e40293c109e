"""Ranks by predicted loss under an exact budget."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor


Key = TypeVar("Key")


def allocate(
    tails: Mapping[Key, Tensor], heads: Mapping[Key, int], budget: int, step: int, floor: int
) -> dict[Key, int]:
    """One rank for each projection: least predicted loss with at most `budget` numbers a token.

    Greedy by loss saved a number. Energies descend, so every curve of losses is convex and the greedy choice is the
    best for any budget that it exhausts.

    Args:
        tails: predicted loss of each rank from 0 to head_dim, `[head_dim + 1]`.
        heads: heads of each projection; a rank costs that many numbers a token.
        budget: largest sum of heads times rank.
        step: ranks are multiples of it, or head_dim.
        floor: smallest rank.

    Raises:
        ValueError: the floors alone exceed the budget.
    """
    limits = {key: len(losses) - 1 for key, losses in tails.items()}
    ranks = {key: min(floor, limits[key]) for key in tails}
    left = budget - sum(heads[key] * rank for key, rank in ranks.items())
    if left < 0:
        raise ValueError(
            f"a rank of {floor} everywhere takes {budget - left} numbers a token, the ratio allows {budget}"
        )
    queue: list[tuple[float, int]] = []
    keys = list(tails)
    losses = {key: tails[key].tolist() for key in keys}

    def offer(number: int) -> None:
        key = keys[number]
        rank, following = ranks[key], min(ranks[key] + step, limits[key])
        if following > rank:
            gain = (losses[key][rank] - losses[key][following]) / (heads[key] * (following - rank))
            heapq.heappush(queue, (-gain, number))

    for number in range(len(keys)):
        offer(number)
    while queue:
        _, number = heapq.heappop(queue)
        key = keys[number]
        following = min(ranks[key] + step, limits[key])
        cost = heads[key] * (following - ranks[key])
        if cost <= left:  # else this projection is done, and a cheaper one may still fit
            ranks[key], left = following, left - cost
            offer(number)
    return ranks
