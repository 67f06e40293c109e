"""Tokens of images kept in another form than those of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..image_tokens import ImageTokens
from ..token_slots import ClassSlots
from .composite import CompositeStore
from .runs import Run
from .segments import (
    Segment,
    check_places,
    checked_segments,
    first_tokens,
    is_mixed,
    last_tokens,
    positions_of,
    stretches_of,
)
from .store import Piece, Store
from .token_buffer import slack


class TokenClassStore(CompositeStore):
    """Tokens of images in one store, all others in another, each contiguous.

    Rows of a batch may have their images in different places. Then a call writes as many slots of a class as the row
    with the most tokens of it needs; those that another row does not need repeat its last token of the class (zero
    where it has none), so that they change the range of no group, and are never read.

    Args:
        image, text: empty stores.
    """

    def __init__(self, image: Store, text: Store):
        self.heads, self.width, self.dtype = image.heads, image.width, image.dtype
        self.image, self.text = image, text
        self.parts = {"image": image, "text": text}
        self.segments: list[Segment] = []
        self.length = 0
        self.positions: dict[str, Tensor] = {}  # of the slots of each part, for kernels

    def __len__(self) -> int:
        return self.length

    def append(self, tokens: Tensor) -> None:
        raise ValueError(
            "this cache keeps tokens of images otherwise than those of text, and was not told which tokens these are"
        )

    def append_marked(self, tokens: Tensor, image_tokens: ImageTokens) -> None:
        count = tokens.shape[2]
        if image_tokens.text_only:
            self.text.append(tokens)
            self._note(Segment(count, 0, count))
        else:
            for part, own in zip((self.image, self.text), by_class(tokens, image_tokens)):
                if own is not None:
                    part.append(own)
            if image_tokens.runs is None:
                slots = image_tokens.slots(tokens.device)
                self._note(Segment(count, slots.image.count, slots.text.count, slots.places))
            else:
                for image, start, stop in image_tokens.runs:
                    self._note(Segment(stop - start, *((stop - start, 0) if image else (0, stop - start))))
        self.dtype = self.text.dtype if len(self.text) else self.image.dtype

    def _note(self, new: Segment) -> None:
        """Add a segment at the end, or to the last one if that is of the same class."""
        self.length += new.tokens
        last = self.segments[-1] if self.segments else None
        alike = last is not None and last.places is new.places is None and (last.image == 0) == (new.image == 0)
        if alike:
            new = Segment(last.tokens + new.tokens, last.image + new.image, last.text + new.text)
            self.segments[-1] = new
        elif new.tokens:
            self.segments.append(new)
            self.positions = {}

    def read(self) -> Tensor:
        if len(self.segments) == 1 and self.segments[0].places is None:
            return (self.image if len(self.image) else self.text).read()
        device = next(self.pieces()).tensor.device
        out = torch.empty(self.batch, self.heads, self.length, self.width, dtype=self.dtype, device=device)
        self.read_into(out)
        return out

    def read_heads(self, heads: slice) -> Tensor:
        parts = {name: part.read_heads(heads) for name, part in self.parts.items() if len(part)}
        if len(self.segments) == 1 and self.segments[0].places is None:
            return parts["image" if self.segments[0].image else "text"]
        like = next(iter(parts.values()))
        shape = (self.batch, heads.stop - heads.start, self.length, self.width)
        out = torch.empty(shape, dtype=self.dtype, device=like.device)
        self._arrange(parts, out)
        return out

    def read_into(self, out: Tensor) -> None:
        runs = {name: [s for s in self.segments if s._asdict()[name]] for name in self.parts}
        # A part of one piece writes its tokens where they belong; another one has to be read as a whole first.
        alone = {name: len(found) == 1 and found[0].places is None for name, found in runs.items()}
        parts = {name: part.read() for name, part in self.parts.items() if runs[name] and not alone[name]}
        self._arrange(parts, out)

    def _arrange(self, parts: dict[str, Tensor], out: Tensor) -> None:
        """Write the tokens into `out` in the order of the text.

        Args:
            parts: what the parts read. One that is missing lies in one piece and writes itself.
        """
        position, start = 0, {"image": 0, "text": 0}
        for segment in self.segments:
            target = out[:, :, position : position + segment.tokens]
            slots = {"image": segment.image, "text": segment.text}
            if segment.places is None:
                name = "image" if segment.image else "text"
                if name not in parts:
                    self.parts[name].read_into(target)
                else:
                    target.copy_(parts[name][:, :, start[name] : start[name] + segment.tokens])
            else:
                pieces = [
                    parts[name][:, :, start[name] : start[name] + count].to(out.dtype)
                    for name, count in slots.items()
                    if count
                ]
                index = torch.where(segment.places < 0, segment.image - 1 - segment.places, segment.places)
                target.copy_(by_row(torch.cat(pieces, dim=2), index))
            position += segment.tokens
            start = {name: start[name] + count for name, count in slots.items()}

    def runs(self) -> list[Run]:
        found = []
        for name, part in self.parts.items():
            if not len(part):
                continue
            mixed = any(segment.places is not None for segment in self.segments)
            for run in part.runs():
                ((start, tokens),) = run.stretches  # of the part's slots
                if mixed:
                    layout = tuple((*segment[:3], segment.hidden) for segment in self.segments)
                    run = run._replace(order=(name, layout, (start, tokens)), stretches=None)
                else:
                    stretches = stretches_of(self.segments, name, start, tokens)
                    run = run._replace(order=stretches, stretches=stretches)
                if mixed or len(run.stretches) > 1:
                    run = run._replace(places=self._positions_of(name)[:, start : start + tokens])
                found.append(run)
        return found

    def _positions_of(self, name: str) -> Tensor:
        """The position of each slot of a part, int32 `[B or 1, slots or more]`, kept while it stays true."""
        positions = self.positions.get(name)
        if positions is None or positions.shape[1] < len(self.parts[name]):
            device = next(self.pieces()).tensor.device
            positions = self.positions[name] = positions_of(self.segments, name, device, slack(len(self.parts[name])))
        return positions

    def crop(self, count: int) -> None:
        if count >= self.length:
            self.reset()
            return
        self.positions = {}
        self.length -= count
        dropped = [0, 0]
        while count:
            segment = self.segments.pop()
            kept = first_tokens(segment, max(segment.tokens - count, 0))
            count -= segment.tokens - kept.tokens
            dropped = [dropped[0] + segment.image - kept.image, dropped[1] + segment.text - kept.text]
            if kept.tokens:
                self.segments.append(kept)
        for part, slots in zip(self.parts.values(), dropped):
            if slots:
                part.crop(slots)

    def keep_last(self, count: int) -> None:
        if count <= 0:
            self.reset()
            return
        drop = max(self.length - count, 0)
        if drop:
            self.positions = {}
        self.length -= drop
        while drop:
            segment = self.segments.pop(0)
            kept = last_tokens(segment, max(segment.tokens - drop, 0))
            drop -= segment.tokens - kept.tokens
            if kept.tokens:
                self.segments.insert(0, kept)
        for name, part in self.parts.items():
            slots = sum(getattr(segment, name) for segment in self.segments)
            if slots < len(part):
                part.keep_last(slots)

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        super().select_batch(index)
        self._map_places(lambda places: places[index.to(places.device) if isinstance(index, Tensor) else index])

    def repeat_batch(self, repeats: int) -> None:
        super().repeat_batch(repeats)
        self._map_places(lambda places: places.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._map_places(lambda places: places.to(device))

    def _map_places(self, change: Callable[[Tensor], Tensor]) -> None:
        self.positions = {}
        self.segments = [
            segment if segment.places is None else segment._replace(places=change(segment.places))
            for segment in self.segments
        ]

    def reset(self) -> None:
        super().reset()
        self.segments, self.length, self.positions = [], 0, {}

    def _places(self) -> list[Tensor]:
        return [segment.places for segment in self.segments if segment.places is not None]

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        for places in (*self._places(), *self.positions.values()):
            yield Piece("places", places, places.numel() * places.element_size())

    def packed(self) -> dict[str, Tensor]:
        return {**super().packed(), **{f"places.{number}": places for number, places in enumerate(self._places())}}

    def state(self) -> dict[str, Tensor]:
        if not self.segments:
            return {}
        # `segments` int64 [segments, 3]: tokens, image slots, text slots; `places` of those that have some, in a row.
        numbers = torch.tensor([segment[:3] for segment in self.segments], device="cpu")
        places = self._places()
        return {
            **super().state(),
            "segments": numbers,
            **({"places": torch.cat(places, dim=1)} if places else {}),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.reset()
        super().load_state({name: value for name, value in state.items() if name not in ("segments", "places")})
        if not state:
            return
        segments = checked_segments(state.get("segments"), len(self.image), len(self.text))
        places = state.get("places")
        mixed = [segment.tokens for segment in segments if is_mixed(segment)]
        if (places is not None) != bool(mixed):
            raise ValueError(
                f"places are {'there' if places is not None else 'missing'}, {len(mixed)} segments need any"
            )
        if places is not None:
            wanted = (self.batch, sum(mixed))
            if places.dtype != torch.int32 or tuple(places.shape) != wanted:
                raise ValueError(f"places are {list(places.shape)} {places.dtype}, wanted {list(wanted)} torch.int32")
            parts = iter(places.split(mixed, dim=1))
            segments = [
                segment._replace(places=next(parts).clone()) if is_mixed(segment) else segment for segment in segments
            ]
        for segment in segments:
            if segment.places is not None:
                check_places(segment)
        self.segments, self.length = segments, sum(segment.tokens for segment in segments)
        self.dtype = self.text.dtype if len(self.text) else self.image.dtype


def by_class(tokens: Tensor, image_tokens: ImageTokens) -> tuple[Tensor | None, Tensor | None]:
    """Tokens of images and others, `[B, H, slots, width]` each; None where there are none of the class."""
    if image_tokens.runs is None:
        slots = image_tokens.slots(tokens.device)
        return gathered(tokens, slots.image), gathered(tokens, slots.text)
    found = []
    for kind in (True, False):
        pieces = [tokens[:, :, start:stop] for image, start, stop in image_tokens.runs if image == kind]
        found.append(torch.cat(pieces, dim=2) if len(pieces) > 1 else next(iter(pieces), None))
    return found[0], found[1]


def gathered(tokens: Tensor, slots: ClassSlots) -> Tensor:
    """Tokens `[B, H, slots, width]` of one class, each row's in its order."""
    chosen = by_row(tokens, slots.index)
    return chosen if slots.none is None else chosen.masked_fill(slots.none[:, None, None, None], 0)


def by_row(tokens: Tensor, index: Tensor) -> Tensor:
    """`tokens [B, H, S, width]` at positions `index [B, n]` of each row: `[B, H, n, width]`.

    Whole rows of memory are copied, which is several times as fast on a CPU as `gather`.
    """
    batch, heads, length, width = tokens.shape
    start = torch.arange(batch * heads, device=tokens.device).view(batch, heads, 1) * length
    flat = (start + index[:, None]).flatten()
    return tokens.reshape(-1, width).index_select(0, flat).view(batch, heads, index.shape[1], width)
