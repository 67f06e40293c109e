"""The arguments of a decoder's forward, cut along the tokens so that one forward after the other can take them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from .compat import CACHE_ARGUMENTS


# Arguments with the tokens in this dimension, by name; whatever else is a tensor cannot be cut.
TOKEN_DIMENSION = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "cache_position": -1,
    "visual_pos_masks": 1,
}
ROWS_AT_A_TIME = 1024


class Prompt:
    """The tokens of one forward of a decoder, and the cache that they go to.

    Args:
        given: the forward's arguments by name.
        cache: what of them is the cache.

    Attributes:
        batch, tokens: of the forward.
        past: tokens that the cache holds of each sequence.
    """

    def __init__(self, given: dict[str, Any], cache: Cache):
        self.given, self.cache = given, cache
        inputs = given.get("inputs_embeds")
        self.name = "input_ids" if inputs is None else "inputs_embeds"
        self.batch, self.tokens = given[self.name].shape[:2]
        self.past = int(cache.get_seq_length())
        self.masks = masks_of(given.get("attention_mask"))
        self.sizes = {kind: cache.get_mask_sizes(self.tokens, layer_of(cache, kind)) for kind in self.masks}

    def can_be_cut(self) -> bool:
        """Whether every argument is known, and says for each token what it says of it."""
        for name, value in self.given.items():
            if name in TOKEN_DIMENSION and isinstance(value, Tensor):
                if value.shape[TOKEN_DIMENSION[name]] != self.tokens:
                    return False
            elif name == "deepstack_visual_embeds" and isinstance(value, list | tuple):
                if self.given.get("visual_pos_masks") is None:
                    return False
            elif name != "attention_mask" and name not in CACHE_ARGUMENTS and not is_plain(value):
                return False
        mask = self.given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return mask.shape[1] >= self.past + self.tokens
        known = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4) or isinstance(mask, dict)
        return known and all(
            mask.ndim == 4 and mask.shape[-2:] == (self.tokens, self.sizes[kind][0])
            for kind, mask in self.masks.items()
        )

    def cuts(self, size: int) -> list[int]:
        """Where pieces of about equal length, of at most `size` tokens, begin and end, 0 and all tokens included.

        A piece is longer where a given mask shows tokens of it what comes later: images that look both ways.
        """
        count = -(-self.tokens // size)
        targets = [self.tokens * piece // count for piece in range(count + 1)]
        for kind, mask in self.masks.items():
            ahead = looks_ahead(mask, self.past - self.sizes[kind][1])
            targets = sorted({moved(ahead, target) for target in targets})
        return targets

    def piece(self, start: int, stop: int) -> dict[str, Any]:
        """The arguments for tokens `start` to `stop`, once the cache holds those before."""
        return {name: self._cut(name, value, start, stop) for name, value in self.given.items()}

    def _cut(self, name: str, value: Any, start: int, stop: int) -> Any:
        if name in TOKEN_DIMENSION and isinstance(value, Tensor):
            dimension = TOKEN_DIMENSION[name] % value.ndim
            return value.narrow(dimension, start, stop - start)
        if name == "deepstack_visual_embeds" and value is not None:
            return self._cut_features(value, start, stop)
        if name != "attention_mask" or value is None:
            return value
        if isinstance(value, Tensor) and value.ndim == 2:
            return value[:, : self.past + stop]
        if isinstance(value, Tensor):
            return self._cut_mask("any", start, stop)
        if not self.masks:  # nothing but what the decoder finds by itself
            return None
        return {kind: self._cut_mask(kind, start, stop) for kind in value}

    def _cut_mask(self, kind: str, start: int, stop: int) -> Tensor:
        columns, first = self.cache.get_mask_sizes(stop - start, layer_of(self.cache, kind))
        first -= self.sizes[kind][1]
        cut = self.masks[kind][:, :, start:stop, first : first + columns]
        # A prompt alone has no column for slots that are empty; what follows it in a cache of fixed size has.
        missing = columns - cut.shape[-1]
        hidden = False if cut.dtype == torch.bool else torch.finfo(cut.dtype).min
        return F.pad(cut, (0, missing), value=hidden) if missing else cut

    def _cut_features(self, features: Any, start: int, stop: int) -> list[Tensor]:
        """Rows of image features, which lie in the order of their tokens, row of the batch by row."""
        mask = self.given["visual_pos_masks"]
        numbers = (mask.flatten().cumsum(0) - 1).view_as(mask)[:, start:stop]
        return [of_layer[numbers[mask[:, start:stop]]] for of_layer in features]


def is_plain(value: Any) -> bool:
    """Whether an argument says nothing of single tokens."""
    return value is None or isinstance(value, bool | int | float | str)


def masks_of(mask: Any) -> dict[str, Tensor]:
    """Finished masks by the kind of layer, "any" for a single one.

    Where one of several is None, there is no padding and nothing looks ahead: all are what the decoder makes itself.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return {"any": mask}
    if isinstance(mask, dict) and all(isinstance(value, Tensor) for value in mask.values()):
        return mask
    return {}


def layer_of(cache: Cache, kind: str) -> int:
    """The first layer that a mask of some kind is for."""
    sliding = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
    wanted = kind == "sliding_attention"
    return sliding.index(wanted) if wanted in sliding else 0


def looks_ahead(mask: Tensor, first: int) -> list[bool]:
    """For each number of first tokens, up to all, whether a mask `[B or 1, H or 1, N, S]` shows them a later one.

    Args:
        first: the column of the first of the N tokens.
    """
    last = []
    for rows in mask.split(ROWS_AT_A_TIME, dim=2):
        seen = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
        seen = seen.flatten(0, 1).any(0)
        furthest = seen.shape[-1] - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
        last.append(torch.where(seen.any(-1), furthest, -1))
    furthest = torch.cat(last).cummax(0).values - first
    later = furthest > torch.arange(len(furthest), device=furthest.device)
    return [False, *later.tolist()]


def moved(ahead: list[bool], target: int) -> int:
    """The last place up to `target` where a piece may end; if there is none, the first behind it."""
    before = next((place for place in range(target, 0, -1) if not ahead[place]), 0)
    if before or target == 0:
        return before
    return next((place for place in range(target, len(ahead)) if not ahead[place]), len(ahead) - 1)
