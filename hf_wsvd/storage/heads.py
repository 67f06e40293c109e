"""Some heads of a layer kept in another form than the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from ..image_tokens import ImageTokens
from .composite import CompositeStore
from .runs import Run
from .store import Store


class SplitHeadsStore(CompositeStore):
    """Some heads in one store, all others in another, each contiguous.

    Args:
        heads: those of the first store; sorted, neither none nor all.
        first, rest: empty stores for so many heads.
        name: of the first store, in names of tensors.
    """

    def __init__(self, heads: tuple[int, ...], first: Store, rest: Store, name: str = "whole"):
        self.heads, self.width = first.heads + rest.heads, rest.width
        self.first_numbers = tuple(heads)
        self.rest_numbers = tuple(head for head in range(self.heads) if head not in heads)
        self.first_heads, self.rest_heads = as_slice(list(heads)), as_slice(list(self.rest_numbers))
        self.first, self.rest = first, rest
        self.parts = {name: first, "rest": rest}

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def __len__(self) -> int:
        return len(self.rest)

    def append(self, tokens: Tensor) -> None:
        self.first.append(tokens[:, self.first_heads])
        self.rest.append(tokens[:, self.rest_heads])

    def append_marked(self, tokens: Tensor, image_tokens: ImageTokens) -> None:
        self.first.append_marked(tokens[:, self.first_heads], image_tokens)
        self.rest.append_marked(tokens[:, self.rest_heads], image_tokens)

    def read(self) -> Tensor:
        first = self.first.read()
        out = first.new_empty((first.shape[0], self.heads, *first.shape[2:]))
        self._read_rest_into(out)
        out[:, self.first_heads] = first
        return out

    def read_into(self, out: Tensor) -> None:
        self._read_rest_into(out)
        if isinstance(self.first_heads, slice):
            self.first.read_into(out[:, self.first_heads])
        else:
            out[:, self.first_heads] = self.first.read().to(out.dtype)

    def _read_rest_into(self, out: Tensor) -> None:
        if isinstance(self.rest_heads, slice):
            self.rest.read_into(out[:, self.rest_heads])
        else:
            out[:, self.rest_heads] = self.rest.read().to(out.dtype)

    def read_heads(self, heads: slice) -> Tensor:
        wanted = range(heads.start, heads.stop)
        found = []
        for part, numbers in ((self.first, self.first_numbers), (self.rest, self.rest_numbers)):
            places = [place for place, head in enumerate(numbers) if head in wanted]
            if places:  # neighbours in the layer are neighbours in their part
                tokens = part.read_heads(slice(places[0], places[-1] + 1))
                found.append((tokens, as_slice([numbers[place] - heads.start for place in places])))
        if len(found) == 1:
            return found[0][0]
        first = found[0][0]
        out = first.new_empty((first.shape[0], len(wanted), *first.shape[2:]))
        for tokens, places in found:
            out[:, places] = tokens.to(out.dtype)
        return out

    def runs(self) -> list[Run]:
        both = ((self.first, self.first_numbers), (self.rest, self.rest_numbers))
        return [run.with_heads(numbers) for part, numbers in both for run in part.runs()]

    def crop(self, count: int) -> None:
        self.first.crop(count)
        self.rest.crop(count)

    def keep_last(self, count: int) -> None:
        self.first.keep_last(count)
        self.rest.keep_last(count)

    def _check_parts(self) -> None:
        super()._check_parts()
        if len(self.first) != len(self.rest):
            raise ValueError(f"the heads hold {len(self.first)} and {len(self.rest)} tokens")


def as_slice(heads: list[int]) -> slice | list[int]:
    """The same heads as a slice where they are evenly spaced: tensors indexed by it are views."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = heads == list(range(heads[0], heads[-1] + 1, step))
    return slice(heads[0], heads[-1] + 1, step) if even else heads
