"""Guarded heads of a model that is compressed: what is asked is checked first, the heads are chosen at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from .cache import stored_layers
from .calibration import is_statistics
from .calibration.batches import Batch
from .decoder import key_value_heads
from .headguard import select_heads
from .headguard.select import resolved_tokens
from .headguard.selectors import ENTRIES
from .image_tokens import reads_images
from .quantizer_config import CacheConfig, GuardMap, WSVDConfig


def chooses_heads(config: WSVDConfig) -> bool:
    """Whether the fit is to choose guarded heads."""
    return config.head_guard is not None and config.head_guard.guard_map is None


def needs_guard_data(config: WSVDConfig) -> bool:
    """Whether it needs calibration data with labels for that."""
    return chooses_heads(config) and ENTRIES[config.head_guard.selector].data


def check_guards(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Raise ValueError unless the heads that `config` guards, or asks to choose, can be those of `model`.

    Needs no weights: the model may be on the meta device.
    """
    if config.guard_map is not None:
        check_map(model, config.guard_map)
    if not chooses_heads(config):
        return
    resolved_tokens(model, config.head_guard, ENTRIES[config.head_guard.selector])
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if all(config.cache.storage(layer, layers, config.compresses).whole for layer in range(layers)):
        raise ValueError(
            f"WSVDConfig: head_guard guards heads of a packed cache, and cache={config.cache.to_dict()} keeps all "
            "tokens in the model's dtype: give it fewer bits"
        )


def check_map(model: PreTrainedModel, guard_map: GuardMap) -> None:
    """Raise ValueError if a guard map is for another model, or for images where `model` reads none."""
    guard_map.check_fits(key_value_heads(model), type(model).__name__)
    if guard_map.tokens == "image" and not reads_images(model):
        raise ValueError(
            f"the guard map is over the tokens of images, and {type(model).__name__} reads none: tokens='all' guards "
            "all tokens"
        )


def check_storage(model: PreTrainedModel, cache: CacheConfig) -> None:
    """Raise ValueError for a packed cache that the layers of `model` cannot have, before heads are measured for it."""
    stored_layers(model, DynamicCache(config=model.config.get_text_config(decoder=True)).layers, cache)


def refuse_statistics(config: WSVDConfig, calibration: Any) -> None:
    """Raise ValueError for statistics in place of calibration data where guarded heads are to be measured."""
    if needs_guard_data(config) and is_statistics(calibration):
        raise ValueError(
            f"head_guard with selector={config.head_guard.selector!r} measures the heads on calibration data, and "
            "statistics hold no labelled inputs: give data as calibration=, or a guard_map of `hf-wsvd headguard`; "
            f"selectors that measure nothing are {[name for name, entry in ENTRIES.items() if not entry.data]}"
        )


def read_again(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Batches that can be gone through a second time; an iterator's are taken into memory."""
    return list(batches) if isinstance(batches, Iterator) else batches


def guard_heads(model: PreTrainedModel, config: WSVDConfig, batches: Iterable[Batch] | None) -> None:
    """Choose the heads that `config.head_guard` asks for and write its `guard_map`; nothing if there is one.

    Args:
        model: with its final weights.
        batches: None for a selector that measures nothing.

    Raises:
        ValueError: as `select_heads`; `config` is then unchanged.
    """
    if chooses_heads(config):
        check_storage(model, config.cache)
        guard_map = select_heads(model, batches, config.head_guard, cache=config.cache)
        config.head_guard = dataclasses.replace(config.head_guard, guard_map=guard_map)
