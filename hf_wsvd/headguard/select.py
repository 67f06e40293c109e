"""The choice of the heads to guard, from a model and calibration data to a `GuardMap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention import bound_layers
from ..calibration.batches import Batch, recorded_source
from ..calibration.data import calibration_info, validate_batches
from ..decoder import evaluation_mode
from ..image_tokens import reads_images
from ..quantizer_config import CacheConfig, GuardMap, HeadGuardConfig
from .measures import HeadMeasures
from .scoring import ScoringTask, key_value_heads
from .selectors import ENTRIES, Entry


def select_heads(
    model: PreTrainedModel,
    batches: Iterable[Batch] | None = None,
    config: HeadGuardConfig | dict[str, Any] | None = None,
    *,
    cache: CacheConfig | dict[str, Any] | None = None,
) -> GuardMap:
    """Choose the KV heads that keep more precision than `cache` gives the others (HeadGuard, arXiv 2609.35800).

    Args:
        model: dense or compressed; it is left as it was. No weight gets a gradient.
        batches: calibration data: model inputs with `input_ids`, `labels` (int64 `[B, S]`, the answer, -100
            elsewhere), and `evidence_mask` (bool `[B, S]`) for selector "retrieval", as `load_calibration` and
            `default_calibration` give them. Selectors "random" and "boundary_layers" need none.
        config: what to choose, and how; None for the defaults. One with a `guard_map` is not measured again.
        cache: the packed storage, which selector "restoration" measures.

    Returns:
        The map, with the scores of all heads.

    Raises:
        ValueError: an option that is not allowed for the model, data that lack what the selector needs (see
            `HeadGuardConfig`), or a finished map for another model.
    """
    config = HeadGuardConfig.parse(config) or HeadGuardConfig()
    if config.guard_map is not None:
        config.guard_map.check_fits(key_value_heads(model), type(model).__name__)
        return config.guard_map
    return measure_heads(model, batches, config, cache=cache).guard_map()


def measure_heads(
    model: PreTrainedModel,
    batches: Iterable[Batch] | None = None,
    config: HeadGuardConfig | dict[str, Any] | None = None,
    *,
    cache: CacheConfig | dict[str, Any] | None = None,
) -> HeadMeasures:
    """As `select_heads`, but what the choice is made from: for maps by several options, and for a file of scores."""
    config = HeadGuardConfig.parse(config) or HeadGuardConfig()
    entry = ENTRIES[config.selector]
    counts = key_value_heads(model)
    if not any(counts):
        raise ValueError(f"{type(model).__name__} has no attention with separate k_proj and v_proj: no heads to guard")
    config = dataclasses.replace(config, tokens=resolved_tokens(model, config, entry), guard_map=None)
    held, info = [], {}
    if entry.data:
        held = checked_data(model, batches, config.selector)
        info = {**calibration_info(held), **recorded_source(batches)}
    task = ScoringTask(model, held, config, CacheConfig.parse(cache) or CacheConfig())
    with evaluation_mode(model):
        scores = entry.selector()(task)
    for side in scores:
        for layer, heads in enumerate(counts):
            if not bool(torch.isfinite(side[layer, :heads]).all()):
                raise ValueError(f"the scores of decoder layer {layer} by selector={config.selector!r} are not finite")
    return HeadMeasures(config, counts, scores, task.raw, bool(bound_layers(model)), info)


def resolved_tokens(model: PreTrainedModel, config: HeadGuardConfig, entry: Entry) -> str:
    """Which tokens guards are for: what `config` says, else "image" for a model that reads images.

    Raises ValueError for a text-only model where images are asked for.
    """
    has_images = reads_images(model)
    if not has_images and entry.images:
        raise ValueError(
            f"selector={config.selector!r} needs a model that reads images, and {type(model).__name__} has no tokens "
            "for them; allowed: selector='output_only' with tokens='all', or one that looks at no images"
        )
    if not has_images and config.tokens == "image":
        raise ValueError(
            f"tokens='image' needs a model that reads images, and {type(model).__name__} has no tokens for them; "
            "allowed: tokens='all'"
        )
    return config.tokens or ("image" if has_images else "all")


def checked_data(model: PreTrainedModel, batches: Iterable[Batch] | None, selector: str) -> list[Batch]:
    """Calibration data on the CPU, checked. ValueError for none, and what `validate_batches` raises."""
    if batches is None:
        raise ValueError(f"selector={selector!r} needs calibration data: batches of model inputs; got None")
    checked = validate_batches(batches, model, description="Reading calibration data")
    held = [{name: value.detach().cpu() for name, value in batch.items()} for batch in checked]
    for number, batch in enumerate(held):
        if "input_ids" not in batch:
            raise ValueError(
                f"Calibration batch {number} needs a column input_ids, which tells images from text; columns found: "
                f"{', '.join(batch)}"
            )
    return held
