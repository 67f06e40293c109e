"""Some heads of a layer kept in another form than the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from .composite import CompositeStore
from .store import Store


class SplitHeadsStore(CompositeStore):
    """Heads `whole_heads` in one store, all others in another, each contiguous.

    Args:
        whole_heads: sorted, neither empty nor all.
        whole, rest: empty stores for so many heads.
    """

    def __init__(self, whole_heads: tuple[int, ...], whole: Store, rest: Store):
        self.heads, self.width, self.dtype = whole.heads + rest.heads, rest.width, rest.dtype
        self.order = [*whole_heads, *(head for head in range(self.heads) if head not in whole_heads)]
        self.back = [self.order.index(head) for head in range(self.heads)]
        self.count = len(whole_heads)
        self.whole, self.rest = whole, rest
        self.parts = {"whole": whole, "rest": rest}

    def __len__(self) -> int:
        return len(self.rest)

    def append(self, tokens: Tensor) -> None:
        self.whole.append(tokens[:, self.order[: self.count]])
        self.rest.append(tokens[:, self.order[self.count :]])

    def read(self) -> Tensor:
        whole, rest = self.whole.read(), self.rest.read()
        if whole.requires_grad:
            return torch.cat([whole, rest.to(whole.dtype)], dim=1)[:, self.back]
        out = whole.new_empty((whole.shape[0], self.heads, *whole.shape[2:]))
        out[:, self.order[: self.count]] = whole
        out[:, self.order[self.count :]] = rest.to(whole.dtype)
        return out

    def crop(self, count: int) -> None:
        self.whole.crop(count)
        self.rest.crop(count)

    def keep_last(self, count: int) -> None:
        self.whole.keep_last(count)
        self.rest.keep_last(count)

    def _check_parts(self) -> None:
        super()._check_parts()
        if len(self.whole) != len(self.rest):
            raise ValueError(f"the heads hold {len(self.whole)} and {len(self.rest)} tokens")
