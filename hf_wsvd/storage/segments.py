"""Runs of tokens in a store of two classes, and where each token lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
