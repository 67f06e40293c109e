"""Tokens of images kept in another form than those of text, in tensors of fixed size and address."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer
from transformers.utils import logging

from ..image_tokens import ImageTokens
from .composite import CompositeStore
from .runs import Run
from .segments import inverse
from .store import Piece, Store
from .token_classes import by_class, by_row


logger = logging.get_logger("hf_wsvd")


class StaticTokenClassStore(CompositeStore):
    """`TokenClassStore` of fixed size.

    The first tokens settle how it is divided: as many slots for images as the row with the most has image tokens, the
    others for text. Later images that find no slot go where text goes, in the form of text.

    Args:
        new_image, new_text: make an empty store for so many slots.
        layer: an empty static layer, which keeps the places of tokens (as `Segment.places` has them, over all slots)
            and counts them.
        heads, width, dtype: of the tokens.
    """

    def __init__(
        self,
        new_image: Callable[[int], Store],
        new_text: Callable[[int], Store],
        layer: StaticLayer,
        heads: int,
        width: int,
        dtype: torch.dtype,
    ):
        self.new_image, self.new_text, self.layer = new_image, new_text, layer
        self.heads, self.width, self.dtype = heads, width, dtype
        self.parts: dict[str, Store] = {}
        self.slots: dict[str, int] = {}
        # A flag and not a look at the length, which lies in a tensor.
        self.has_tokens = False
        self.has_free_image_slots = False  # after a crop: then text may find too few

    def __len__(self) -> int:
        return int(self.layer.get_seq_length())

    @property
    def batch(self) -> int:
        return self.layer.keys.shape[0] if self.layer.is_initialized else 0

    def append(self, tokens: Tensor) -> None:
        raise ValueError(
            "this cache keeps tokens of images otherwise than those of text, and was not told which tokens these are"
        )

    def append_marked(self, tokens: Tensor, image_tokens: ImageTokens) -> None:
        image = text = None
        if not image_tokens.text_only:
            image, text = by_class(tokens, image_tokens)
        if not self.has_tokens:
            self._divide(0 if image is None else image.shape[2], tokens.shape[2], 0 if text is None else text.shape[2])
            self.has_tokens = True
        if self.has_free_image_slots:
            self._check_text_fits(tokens, image, text)
        if image is not None and not self._fits(image.shape[2]):
            logger.warning_once(
                "hf_wsvd: a cache of fixed size has no room for these images among the image tokens of its first "
                "prompt: they are kept as text is"
            )
            image = None
        if image is None:
            count = tokens.shape[2]
            places = -1 - self._text_length() - torch.arange(count, device=tokens.device)
            self.parts["text"].append(tokens)
            places = places.expand(tokens.shape[0], count)
        else:
            places = self._places_of(tokens, image_tokens)
            self.parts["image"].append(image)
            if text is not None:
                self.parts["text"].append(text)
        places = places.to(torch.int32)[:, None, :, None]
        self.layer.update(places, places[..., :0])

    def _divide(self, image: int, tokens: int, text: int) -> None:
        """Make the parts, for first tokens of so many slots; those of an earlier prompt stay where they fit."""
        most = self.layer.max_cache_len
        slots = {"image": image, "text": most - tokens + text if image else most}
        if slots != self.slots:
            self.slots = slots
            makers = {"image": self.new_image, "text": self.new_text}
            self.parts = {name: makers[name](count) for name, count in slots.items() if count}

    def _fits(self, count: int) -> bool:
        return "image" in self.parts and len(self.parts["image"]) + count <= self.slots["image"]

    def _check_text_fits(self, tokens: Tensor, image: Tensor | None, text: Tensor | None) -> None:
        kept_apart = image is not None and self._fits(image.shape[2])
        count = (0 if text is None else text.shape[2]) if kept_apart else tokens.shape[2]
        room = self.slots.get("text", 0) - int(self._text_length() if "text" in self.parts else 0)
        if count > room:
            raise ValueError(
                f"a cache of fixed size has room for {room} more tokens of text and got {count}: it was cropped into "
                "the images of its first prompt, whose slots hold no text. Use reset() and give it the prompt anew"
            )

    def _text_length(self) -> Tensor | int:
        return counter_of(self.parts["text"]).get_seq_length()

    def _places_of(self, tokens: Tensor, image_tokens: ImageTokens) -> Tensor:
        """Places of tokens of both classes, int64 `[B, n]`, over all slots of the parts."""
        if image_tokens.runs is None:
            places = image_tokens.slots(tokens.device).places
        else:
            mask = torch.cat(
                [torch.full((stop - start,), image, device=tokens.device) for image, start, stop in image_tokens.runs]
            )
            places = torch.where(mask, mask.cumsum(0) - 1, -(~mask).cumsum(0)).expand(tokens.shape[0], -1)
        text = self._text_length() if "text" in self.parts else 0
        return torch.where(places < 0, places - text, places + len(self.parts["image"]))

    def read(self) -> Tensor:
        return self.read_heads(slice(0, self.heads))

    def read_heads(self, heads: slice) -> Tensor:
        places = self.layer.keys[:, 0, :, 0]
        image = self.slots["image"]
        index = torch.where(places < 0, image - 1 - places, places)
        return by_row(torch.cat([part.read_heads(heads) for part in self.parts.values()], dim=2), index)

    def runs(self) -> list[Run]:
        places = self.layer.keys[:, 0, :, 0]
        written = torch.arange(places.shape[1], device=places.device) < self.layer.get_seq_length()
        found = []
        for name, part in self.parts.items():
            slots = places if name == "image" else -1 - places
            positions = inverse(torch.where(written, slots, -1), self.slots[name])
            for run in part.runs():
                order = (name, tuple(self.slots.items()), run.stretches)
                found.append(run._replace(order=order, stretches=None, places=positions))
        return found

    def crop(self, count: int) -> None:
        self.layer.crop(-count)
        kept = self.layer.keys[:, 0, : len(self), 0]
        if not kept.numel():
            self.reset()
            return
        low, high = (int(number) for number in kept.aminmax())
        for name, slots in (("image", max(high + 1, 0)), ("text", max(-low, 0))):
            if name in self.parts:
                self.parts[name].crop(len(self.parts[name]) - slots)
        self.has_free_image_slots = "image" in self.parts and len(self.parts["image"]) < self.slots["image"]

    def keep_last(self, count: int) -> None:
        raise NotImplementedError("a static layer keeps its window by itself")

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        super().select_batch(index)
        self._set_places(lambda places: places[index])

    def repeat_batch(self, repeats: int) -> None:
        super().repeat_batch(repeats)
        self._set_places(lambda places: places.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._set_places(lambda places: places.to(device))

    def _set_places(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.layer.is_initialized:
            self.layer.keys, self.layer.values = change(self.layer.keys), change(self.layer.values)

    def reset(self) -> None:
        super().reset()
        self.layer.reset()
        self.has_tokens = self.has_free_image_slots = False

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        if self.layer.is_initialized:
            places = self.layer.keys
            yield Piece("places", places, places.nbytes // self.layer.max_cache_len * len(self))

    def packed(self) -> dict[str, Tensor]:
        return {**super().packed(), "places": self.layer.keys[:, 0, :, 0]}

    def state(self) -> dict[str, Tensor]:
        raise NotImplementedError("a static cache cannot be saved")

    def load_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError("a static cache cannot be loaded")


def counter_of(store: Store) -> StaticLayer:
    """The static layer of transformers that counts the tokens of a store of fixed size."""
    layer = getattr(store, "layer", None)
    return counter_of(next(iter(store.parts.values()))) if layer is None else layer
