"""Where the tokens of a forward go in a cache that keeps tokens of images and of text apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ClassSlots(NamedTuple):
    """Where tokens of one class go that lie in other places in every row.

    Attributes:
        count: slots, as many as the row with the most such tokens needs.
        index: int64 `[B, count]`, the position of the token for each slot. A row with fewer repeats its last one.
        none: bool `[B]`, rows without such a token; None where every row has one.
    """

    count: int
    index: Tensor
    none: Tensor | None


class Slots(NamedTuple):
    """Where the tokens of a forward go: slots of both classes, and `places`, int32 `[B, N]`, of every position.

    A place is the number s of the slot for a token of an image, and -1 - s for another one.
    """

    image: ClassSlots
    text: ClassSlots
    places: Tensor


def slots_of(mask: Tensor) -> Slots:
    """`Slots` of a mask `[B, N]`."""
    fewest, most = (int(count) for count in mask.sum(1).aminmax())
    image = class_slots(mask, most, fewest == 0)
    text = class_slots(~mask, mask.shape[1] - fewest, most == mask.shape[1])
    places = torch.where(mask, mask.cumsum(1) - 1, -(~mask).cumsum(1)).to(torch.int32)
    return Slots(image, text, places)


def class_slots(own: Tensor, count: int, missing: bool) -> ClassSlots:
    """Slots of the class whose tokens `own` bool `[B, N]` marks; `missing`: some row has none."""
    counts = own.sum(1)
    # A stable sort brings the positions of the class to the front, in order.
    positions = (~own).to(torch.uint8).sort(dim=1, stable=True).indices
    slot = torch.arange(count, device=own.device).minimum((counts[:, None] - 1).clamp(min=0))
    return ClassSlots(count, positions.gather(1, slot), counts == 0 if missing else None)
