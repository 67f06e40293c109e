"""Runs of a model over calibration data in which something is measured of every head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.batches import BESIDE_INPUTS, Batch
from ..calibration.cached_run import undisturbed
from ..calibration.chat import place
from ..calibration.grouping import group_tokens, groups_of, joined
from ..calibration.modes import frozen
from ..decoder import evaluation_mode
from .observer import AttentionCall, observed
from .positions import Positions, positions_of
from .scoring import ScoringTask


Measure = Callable[[AttentionCall, Positions], Tensor]


def grouped(task: ScoringTask) -> Iterator[Batch]:
    """The calibration data in forwards of a fair size, on the model's device, under a progress bar."""
    groups = list(groups_of(task.batches, group_tokens(task.model.device)))
    for members in logging.tqdm(groups, desc="Scoring heads", unit="batch"):
        yield place(joined(members), task.model)


@contextmanager
def undisturbed_run(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and frozen weights inside; outside all is as it was, the random state too."""
    with ExitStack() as stack:
        for mode in (evaluation_mode, frozen, undisturbed):
            stack.enter_context(mode(model))
        yield


def require(task: ScoringTask, *, images: bool = False, answers: bool = False) -> None:
    """Raise ValueError unless some row of the data has what is asked for (both, if both are)."""
    selector = f"selector={task.config.selector!r}"
    held = [positions_of(batch, task.model) for batch in task.batches]
    with_image = [positions.image.any(1) for positions in held]
    with_answer = [positions.answer_queries.any(1) for positions in held]
    if answers and not any(bool(rows.any()) for rows in with_answer):
        raise ValueError(f"{selector} needs labels: calibration data hold no answer (none, or -100 everywhere)")
    if images and not any(bool(rows.any()) for rows in with_image):
        raise ValueError(f"{selector} needs images: calibration data hold no tokens of an image in input_ids")
    if images and answers and not any(bool((a & b).any()) for a, b in zip(with_image, with_answer)):
        raise ValueError(f"{selector} needs rows with an image and labels: calibration data hold none with both")


def inputs_of(batch: Batch) -> Batch:
    """What the model takes of a batch."""
    return {name: value for name, value in batch.items() if name not in BESIDE_INPUTS}


@torch.no_grad()
def measured(task: ScoringTask, measure: Measure) -> Tensor:
    """`measure` (`[B, heads]`, NaN for rows that do not count) of every layer's attention in forwards without a cache.

    Returns:
        `[samples, layers, heads]` fp32 on the CPU, NaN where a layer has no such head.

    Raises:
        ValueError: data without `input_ids`, or a layer that never called its attention function.
    """
    rows = []
    with undisturbed_run(task.model):
        for batch in grouped(task):
            positions, found = positions_of(batch, task.model), {}

            def see(call: AttentionCall, positions: Positions = positions, found: dict = found) -> None:
                found[call.layer] = measure(call, positions)

            with observed(task.model, see):
                task.model(**inputs_of(batch), use_cache=False)
            rows.append(stacked(task, found))
    return torch.cat(rows)


def stacked(task: ScoringTask, by_layer: dict[int, Tensor]) -> Tensor:
    """`[B, heads]` by decoder layer as one tensor `[B, layers, heads]` fp32 on the CPU, NaN where there is no head.

    Raises ValueError if a layer with keys of its own is missing.
    """
    missing = sorted({attention.layer for attention in task.attentions} - set(by_layer))
    if missing or not by_layer:
        raise ValueError(
            f"the attention of decoder layers {missing} of {type(task.model).__name__} does not go through "
            "transformers' attention interface: its heads cannot be measured"
        )
    rows, heads = len(next(iter(by_layer.values()))), max(value.shape[1] for value in by_layer.values())
    result = torch.full((rows, len(task.num_key_value_heads), heads), float("nan"))
    for layer, value in by_layer.items():
        result[:, layer, : value.shape[1]] = value.float().cpu()
    return result
