"""What kernels read of a store: runs of tokens that lie one behind the other."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ..kernels import StoredTokens


class Stretch(NamedTuple):
    """Neighbouring tokens of a sequence: the position of the first, and how many."""

    position: int
    tokens: int


class Run(NamedTuple):
    """Tokens of some heads of a store, as they are kept.

    Attributes:
        stored: the tokens, views.
        heads: of the store, in the order of the tokens.
        order: equal for two runs of a layer whose slots hold the same positions. Where rows of the batch differ: class
            of the tokens, layout of both classes, slots of this run.
        stretches: which positions the slots hold, one after the other; None where rows of the batch differ.
        places: int32 `[B or 1, S]`, the position of each slot, -1 for none; None where a single stretch says it.
        rotation: what a scheme turned the tokens with: they read as `numbers @ rotation.T`.
    """

    stored: StoredTokens
    heads: tuple[int, ...]
    order: tuple
    stretches: tuple[Stretch, ...] | None
    places: Tensor | None = None
    rotation: Tensor | None = None

    @classmethod
    def of(cls, stored: StoredTokens, rotation: Tensor | None = None) -> Run:
        """All tokens of all heads of a store, in order."""
        heads, tokens = stored.payload.shape[1:3]
        stretches = (Stretch(0, tokens),)
        return cls(stored, tuple(range(heads)), stretches, stretches, None, rotation)

    @property
    def tokens(self) -> int:
        """Slots of the run."""
        return self.stored.payload.shape[2]

    def moved(self, count: int) -> Run:
        """The same with every position `count` further."""
        stretches = tuple(Stretch(position + count, tokens) for position, tokens in self.stretches)
        return self._replace(order=stretches, stretches=stretches)

    def with_heads(self, numbers: tuple[int, ...]) -> Run:
        """The same where head h of the run's store is head `numbers[h]` of a larger one."""
        return self._replace(heads=tuple(numbers[head] for head in self.heads))

    def of_heads(self, heads: tuple[int, ...]) -> Run:
        """Some of its heads, evenly spaced."""
        if heads == self.heads:
            return self
        chosen = evenly(tuple(self.heads.index(head) for head in heads))
        scales, head_scales = self.stored.scales, self.stored.head_scales
        stored = self.stored._replace(
            payload=self.stored.payload[:, chosen],
            scales=None if scales is None else scales[:, chosen],
            head_scales=None if head_scales is None else head_scales[chosen].contiguous(),
        )
        return self._replace(stored=stored, heads=heads)

    def of_slots(self, start: int, tokens: int) -> StoredTokens:
        """The tokens of some slots."""
        scales = self.stored.scales
        return self.stored._replace(
            payload=self.stored.payload[:, :, start : start + tokens],
            scales=None if scales is None else scales[:, :, start : start + tokens],
        )

    def of_stretch(self, position: int, tokens: int) -> Run:
        """The tokens of positions that lie in one of its stretches."""
        start = 0
        for stretch in self.stretches:
            if stretch.position <= position < stretch.position + stretch.tokens:
                break
            start += stretch.tokens
        kept = (Stretch(position, tokens),)
        stored = self.of_slots(start + position - stretch.position, tokens)
        return self._replace(stored=stored, order=kept, stretches=kept, places=None)

    def without_first(self, count: int) -> list[Run]:
        """The tokens from position `count` on, which becomes 0."""
        if self.stretches is None:
            of_class, layout, slots = self.order
            order = (of_class, (count, layout), slots)
            return [self._replace(order=order, places=(self.places - count).clamp(min=-1))]
        kept = [
            self.of_stretch(max(position, count), position + tokens - max(position, count))
            for position, tokens in self.stretches
            if position + tokens > count
        ]
        return [run.moved(-count) for run in kept]


def evenly(heads: tuple[int, ...]) -> slice:
    """Evenly spaced heads as a slice, whose index into a tensor is a view."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    return slice(heads[0], heads[-1] + 1, step)


def evenly_spaced(heads: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Heads as (number in one run, number in another) in groups that are evenly spaced in both, found in one walk."""
    groups: list[list[tuple[int, int]]] = []
    for head in heads:
        group = groups[-1] if groups else []
        last_steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise([*group[-2:], head])]
        if group and len(set(last_steps)) == 1:
            group.append(head)
        else:
            groups.append([head])
    return groups


def overlaps(one: Run, other: Run) -> list[Stretch]:
    """Stretches of positions that both runs hold; both without `places` by row."""
    found = (
        Stretch(start, stop - start)
        for a in one.stretches
        for b in other.stretches
        if (stop := min(a.position + a.tokens, b.position + b.tokens)) > (start := max(a.position, b.position))
    )
    return sorted(found)


def paired(key_runs: list[Run], value_runs: list[Run]) -> list[tuple[Run, Run]] | None:
    """Runs of keys and of values with the same heads and tokens each, views of those given.

    None where a batch has its tokens in another order on one side, differently in every row.
    """
    pairs = []
    for key in key_runs:
        for value in value_runs:
            common = set(key.heads) & set(value.heads)
            if not common or are_of_other_classes(key, value):
                continue
            if key.order == value.order:
                alike = [(key, value)]
            elif key.stretches is None or value.stretches is None:
                return None
            else:
                alike = [(key.of_stretch(*s), value.of_stretch(*s)) for s in overlaps(key, value)]
            if len(common) == len(key.heads) == len(value.heads):
                pairs.extend(alike)
                continue
            numbers = [(key.heads.index(head), value.heads.index(head)) for head in sorted(common)]
            for group in evenly_spaced(numbers):
                heads = tuple(key.heads[number] for number, _ in group)
                pairs.extend((k.of_heads(heads), v.of_heads(heads)) for k, v in alike)
    return pairs


def are_of_other_classes(one: Run, other: Run) -> bool:
    """Whether runs of a batch whose rows differ hold tokens of different classes."""
    apart = one.stretches is None and other.stretches is None
    return apart and one.order[0] != other.order[0] and one.order[1] == other.order[1]
