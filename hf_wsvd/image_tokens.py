"""Which tokens of a forward are of images: a cache sees keys and values alone and has to be told."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .token_slots import Slots, slots_of


class ImageTokens:
    """Token classes of one forward.

    Args:
        mask: bool `[B, N]`, true for tokens of images and videos; None where there are none. It is looked at here,
            once for all layers.

    Attributes:
        mask: the same.
        runs: (is image, start, stop) of the runs of equal class where all rows are alike, else None.
        text_only: whether no token is of an image.
    """

    def __init__(self, mask: Tensor | None = None):
        self.mask = mask
        self.runs: list[tuple[bool, int, int]] | None = None
        self.text_only = mask is None
        self._slots: dict[torch.device, Slots] = {}
        if mask is None:
            return
        if not mask.numel():
            self.runs = []
        elif bool((mask == mask[:1]).all()):
            first = mask[0].tolist()
            edges = [0, *(i for i in range(1, len(first)) if first[i] != first[i - 1]), len(first)]
            self.runs = [(first[a], a, b) for a, b in pairwise(edges)]
            self.text_only = not any(image for image, _, _ in self.runs)

    @classmethod
    def of_rows_alike(cls, runs: list[tuple[bool, int, int]]) -> ImageTokens:
        """Classes of a forward whose rows are alike, without a tensor."""
        tokens = cls()
        tokens.runs, tokens.text_only = runs, False
        return tokens

    def part(self, start: int, stop: int) -> ImageTokens:
        """Those of some of the tokens."""
        if self.mask is not None:
            return ImageTokens(self.mask[:, start:stop])
        if self.text_only or self.runs is None:
            return self
        kept = ((image, max(first, start) - start, min(last, stop) - start) for image, first, last in self.runs)
        runs = [(image, first, last) for image, first, last in kept if first < last]
        return ImageTokens.of_rows_alike(runs)

    def are_of(self, batch: int, count: int) -> bool:
        """Whether these can be the classes of `count` tokens of `batch` sequences."""
        if self.mask is not None:
            return tuple(self.mask.shape) == (batch, count)
        return self.text_only or (self.runs[-1][2] if self.runs else 0) == count

    def check(self, batch: int, count: int) -> None:
        """Raise ValueError unless these are the classes of `count` tokens of `batch` sequences."""
        if not self.are_of(batch, count):
            found = list(self.mask.shape) if self.mask is not None else self.runs
            raise ValueError(f"image_tokens: mask is {found}, but the cache got [{batch}, {count}] tokens")

    def slots(self, device: torch.device) -> Slots:
        """Where tokens go in a batch whose rows differ; worked out once for all layers of a device."""
        if device not in self._slots:
            self._slots[device] = slots_of(self.mask.to(device))
        return self._slots[device]


VISUAL_TOKEN_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
# Arguments of forwards that bring no image. Whatever else is given (pixels, encoded images under any name) may.
TEXT_INPUTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "labels", "cache"),
    *("past_key_values", "logits_to_keep", "token_type_ids", "mm_token_type_ids", "rope_deltas", "seq_idx"),
    # Of images, but none by themselves: some models get them at every step.
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes", "pixel_attention_mask"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
TEXT_ONLY = ImageTokens()


class _Slot:
    """Holds the classes while dynamo traces, which cannot write thread-local attributes.

    Attributes of the object from the start: one that appears in the first forward has the second compiled anew.
    """

    def __init__(self) -> None:
        self.image_tokens: ImageTokens | None = None
        self.teller: nn.Module | None = None
        self.callers: ImageTokens | None = None


_traced = _Slot()
_local = threading.local()


def current_image_tokens() -> ImageTokens | None:
    """Those of the forward that runs in this thread; None outside of any that was told."""
    told = None if torch.compiler.is_compiling() else getattr(_local, "image_tokens", None)
    # A compiled forward may come to its cache in a frame that dynamo leaves alone.
    return _traced.image_tokens if told is None else told


def teller_of() -> nn.Module | None:
    """The module whose forward told the current classes; None where the caller did."""
    return _traced.teller if torch.compiler.is_compiling() else getattr(_local, "teller", None)


def set_image_tokens(image_tokens: ImageTokens | None, teller: nn.Module | None = None) -> None:
    """Open a forward in this thread, or close the open one with None.

    Args:
        teller: the module whose forward it is.
    """
    place = _traced if torch.compiler.is_compiling() else _local
    place.image_tokens, place.teller = image_tokens, teller


def callers_image_tokens() -> ImageTokens | None:
    """What the caller has told (`image_tokens`), whatever a forward inside has found since."""
    return getattr(_traced if torch.compiler.is_compiling() else _local, "callers", None)


@contextmanager
def image_tokens(mask: Tensor) -> Iterator[None]:
    """Tell the caches of forwards inside which of their tokens are of images.

    For forwards that cannot tell by themselves: of a decoder alone, or with `inputs_embeds`. Calls with `input_ids`
    of a vision-language model need it not; those of text alone and of another size go by themselves, so that
    `generate(inputs_embeds=...)` may stand inside.

    Args:
        mask: bool `[batch, tokens]` of the forward.

    Raises:
        ValueError: another dtype or rank.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        form = f"{list(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"image_tokens: mask must be a bool tensor [batch, tokens], got {form}")
    with told(ImageTokens(mask)):
        yield


@contextmanager
def told(classes: ImageTokens) -> Iterator[None]:
    """`image_tokens` for classes that are there already."""
    before, teller, callers = current_image_tokens(), teller_of(), callers_image_tokens()
    place = _traced if torch.compiler.is_compiling() else _local
    set_image_tokens(classes)
    place.callers = classes
    try:
        yield
    finally:
        set_image_tokens(before, teller)
        place.callers = callers


class ImageWatch:
    """What the hooks of one module know.

    Attributes:
        token_ids: that stand for images and videos in `input_ids`.
        parameters: names of the forward's parameters, in order.
    """

    def __init__(self, token_ids: tuple[int, ...], parameters: list[str]):
        self.token_ids, self.parameters = token_ids, parameters
        self.handles: list[Any] = []


def visual_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Token ids that stand for images and videos in the inputs of a model; none for one that reads text alone."""
    found = (getattr(model.config, name, None) for name in VISUAL_TOKEN_IDS)
    return tuple(sorted({number for number in found if type(number) is int}))


def reads_images(model: PreTrainedModel) -> bool:
    """Whether tokens of images or videos stand among those of a model's text."""
    return bool(visual_token_ids(model))


def watch_image_tokens(model: PreTrainedModel) -> bool:
    """Let every forward of `model` tell its caches which tokens are of images; nothing where it does so already.

    A call without visual inputs is known to be of text without a look at its tokens. One with visual inputs but no
    `input_ids`, or with `inputs_embeds` alone, tells nothing: see `image_tokens`.

    Returns:
        Whether hooks were installed now.
    """
    token_ids, installed = visual_token_ids(model), False
    for module in dict.fromkeys((model, model.base_model)):
        parameters = list(inspect.signature(module.forward).parameters)
        if hasattr(module, "_wsvd_images") or not {"input_ids", "pixel_values"} <= set(parameters):
            continue
        module._wsvd_images = ImageWatch(token_ids, parameters)
        module._wsvd_images.handles = [
            module.register_forward_pre_hook(open_forward, with_kwargs=True),
            module.register_forward_hook(close_forward, always_call=True),
        ]
        installed = True
    return installed


def unwatch_image_tokens(model: PreTrainedModel) -> None:
    """Undo `watch_image_tokens`; nothing where it was not called."""
    for module in (model, model.base_model):
        watch = vars(module).pop("_wsvd_images", None)
        for handle in watch.handles if watch is not None else ():
            handle.remove()


def may_bring_images(name: str, value: Any) -> bool:
    """Whether an argument of this name and value can hold images or videos."""
    if name in TEXT_INPUTS or not isinstance(value, Tensor | dict | list | tuple):
        return False
    return isinstance(value, Tensor) or len(value) > 0


def open_forward(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook: what an outer forward or the caller has told stays."""
    teller = teller_of()
    # What another forward has told was left by one that was interrupted: hooks run after errors, not after Ctrl-C.
    if teller is not None and teller is not module and is_within(module, teller):
        return
    callers, classes = callers_image_tokens(), classes_of(module._wsvd_images, args, kwargs)
    if callers is None:
        set_image_tokens(classes, None if classes is None else module)
    elif classes is TEXT_ONLY and not callers.are_of(*input_ids_of(module._wsvd_images, args, kwargs).shape):
        set_image_tokens(classes, module)  # a later step of `generate`
    else:
        set_image_tokens(callers)


def close_forward(module: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook, called after an exception too."""
    if teller_of() is module:
        set_image_tokens(callers_image_tokens())


def is_within(module: nn.Module, outer: nn.Module) -> bool:
    """Whether `module` is a part of `outer`."""
    return getattr(outer, "base_model", None) is module or any(part is module for part in outer.modules())


def input_ids_of(watch: ImageWatch, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Those of a call."""
    return {**dict(zip(watch.parameters, args)), **kwargs}.get("input_ids")


def classes_of(watch: ImageWatch, args: tuple, kwargs: dict[str, Any]) -> ImageTokens | None:
    """The token classes of a call; None where it does not show them."""
    given = {**dict(zip(watch.parameters, args)), **kwargs}
    input_ids = input_ids_of(watch, args, kwargs)
    if input_ids is None:
        return None
    if not any(may_bring_images(name, value) for name, value in given.items()):
        return TEXT_ONLY
    mask = input_ids == watch.token_ids[0]
    for token_id in watch.token_ids[1:]:
        mask = mask | (input_ids == token_id)
    return ImageTokens(mask)
