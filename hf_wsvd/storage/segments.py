"""Runs of tokens in a store of two classes, and where each token lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .runs import Stretch


class Segment(NamedTuple):
    """Neighbouring tokens, and where each part has them.

    Attributes:
        tokens: of a sequence.
        image, text: slots that the parts have for them. The slots of a part follow each other as the segments do.
        places: int32 `[B, tokens]` where rows differ: slot s of the image part as s, of the text part as -1 - s,
            counted from the segment's first. None: all tokens are of one class, in order.
        hidden: tokens before it that were dropped while their slots are still there.
    """

    tokens: int
    image: int
    text: int
    places: Tensor | None = None
    hidden: int = 0


def is_mixed(segment: Segment) -> bool:
    """Whether a segment needs `places`: n tokens of one class in n slots can lie in one way alone."""
    return (segment.image, segment.text) not in ((segment.tokens, 0), (0, segment.tokens))


def first_tokens(segment: Segment, tokens: int) -> Segment:
    """The first `tokens` of a segment, without slots behind them."""
    if tokens in (0, segment.tokens):
        return segment if tokens else Segment(0, 0, 0)
    if segment.places is None:
        return Segment(tokens, *(tokens if slots else 0 for slots in (segment.image, segment.text)))
    places = segment.places[:, :tokens].clone()
    low, high = (int(number) for number in places.aminmax())
    kept = Segment(tokens, max(high + 1, 0), max(-low, 0), places, segment.hidden)
    return kept if is_mixed(kept) else kept._replace(places=None, hidden=0)


def last_tokens(segment: Segment, tokens: int) -> Segment:
    """The last `tokens` of a segment.

    Slots before them stay until they are the greater part: which they are is a look at a tensor, too much for each
    step of a sliding window.
    """
    if tokens in (0, segment.tokens):
        return segment if tokens else Segment(0, 0, 0)
    if segment.places is None:
        return Segment(tokens, *(tokens if slots else 0 for slots in (segment.image, segment.text)))
    places, hidden = segment.places[:, -tokens:], segment.hidden + segment.tokens - tokens
    if hidden <= tokens:
        return segment._replace(tokens=tokens, places=places, hidden=hidden)
    image, text = (
        min(int(torch.where(own, slots, most).min()), most)
        for own, slots, most in ((places >= 0, places, segment.image), (places < 0, -1 - places, segment.text))
    )
    places = torch.where(places < 0, places + text, places - image)
    kept = Segment(tokens, segment.image - image, segment.text - text, places)
    return kept if is_mixed(kept) else kept._replace(places=None)


def checked_segments(numbers: Tensor | None, image: int, text: int) -> list[Segment]:
    """The segments of a state. ValueError unless they are those of parts with so many slots."""
    if numbers is None or numbers.dtype != torch.int64 or numbers.ndim != 2 or numbers.shape[1] != 3:
        found = "missing" if numbers is None else f"{list(numbers.shape)} {numbers.dtype}"
        raise ValueError(f"segments are {found}, wanted [any, 3] torch.int64")
    segments = [Segment(*row) for row in numbers.tolist()]
    for segment in segments:
        few = max(segment.image, segment.text) <= max(image, text) and min(segment[:3]) >= 0
        if not (few and 0 < segment.tokens <= segment.image + segment.text):
            raise ValueError(f"a segment of {segment.tokens} tokens, {segment.image} and {segment.text} slots")
    sums = sum(segment.image for segment in segments), sum(segment.text for segment in segments)
    if sums != (image, text):
        raise ValueError(f"segments of {sums} slots do not fit {image} tokens of images and {text} others")
    return segments


def check_places(segment: Segment) -> None:
    """ValueError unless every row of a segment has slots of its own, in order, within those that there are."""
    places = segment.places
    for own, slots, count in (
        (places >= 0, places, segment.image),
        (places < 0, -1 - places.long(), segment.text),
    ):
        slots = torch.where(own, slots, -1)
        highest = slots.cummax(dim=1).values
        before = torch.nn.functional.pad(highest[:, :-1], (1, 0), value=-1)
        if not bool(((slots < count) & (~own | (slots > before))).all()):
            raise ValueError("places point to slots that are not there, or to one slot twice")


def stretches_of(segments: list[Segment], name: str, start: int, tokens: int) -> tuple[Stretch, ...]:
    """Positions of the tokens in slots `start` to `start + tokens` of a part, where all rows are alike.

    Args:
        name: of the part, "image" or "text".
    """
    found, position, slot = [], 0, 0
    for segment in segments:
        slots = getattr(segment, name)
        first, last = max(slot, start), min(slot + slots, start + tokens)
        if first < last:
            found.append(Stretch(position + first - slot, last - first))
        position, slot = position + segment.tokens, slot + slots
    return tuple(found)


def positions_of(segments: list[Segment], name: str, device: torch.device, spare: int) -> Tensor:
    """The position of each slot of a part, int32 `[B or 1, slots + spare]`; -1 for a slot without a token.

    Args:
        name: of the part, "image" or "text".
        spare: slots more, for tokens that may follow the last segment.
    """
    found, position = [], 0
    for number, segment in enumerate(segments):
        slots = getattr(segment, name)
        if segment.places is None and slots:
            ahead = spare if number == len(segments) - 1 else 0
            found.append(torch.arange(position, position + slots + ahead, dtype=torch.int32, device=device)[None])
        elif slots:
            found.append(inverse(segment.places if name == "image" else -1 - segment.places, slots, position))
        position += segment.tokens
    batch = max(len(positions) for positions in found)
    return torch.cat([positions.expand(batch, -1) for positions in found], dim=1)


def inverse(slots: Tensor, count: int, first: int = 0) -> Tensor:
    """From the slot of every position `[B, N]` (negative: none) to the position of every slot, int32 `[B, count]`.

    Positions count from `first`; -1 for a slot without a token.
    """
    positions = torch.arange(first, first + slots.shape[1], dtype=torch.int32, device=slots.device)
    found = torch.full((slots.shape[0], count + 1), -1, dtype=torch.int32, device=slots.device)
    found.scatter_(1, torch.where(slots < 0, count, slots).long(), positions.expand_as(slots).contiguous())
    return found[:, :count]
