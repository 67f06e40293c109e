"""Selector "attention_mass": how much of its attention a head gives to images."""

from __future__ import annotations

from torch import Tensor

from ..quantizer_config import HeadGuardConfig
from .combination import physical, sample_mean
from .measuring import measured, require
from .observer import AttentionCall
from .positions import Positions
from .scoring import HeadScores, ScoringTask


MASS = "image_attention_mass"  # name in `ScoringTask.raw`


def attention_mass(task: ScoringTask) -> HeadScores:
    """Mean attention on keys of images over the queries of text, of query heads averaged to KV heads.

    Leaves in `task.raw` `image_attention_mass`, fp32 `[samples, layers, query heads]`, NaN for rows without an image.

    Raises:
        ValueError: no tokens of images in the data.
    """
    require(task, images=True)
    task.raw[MASS] = measured(task, _mass)
    return combined(task.raw, task.num_key_value_heads, task.config)


def combined(raw: dict[str, Tensor], num_key_value_heads: list[int], config: HeadGuardConfig) -> HeadScores:
    """Scores from the samples' masses."""
    scores = physical(sample_mean(raw[MASS]), num_key_value_heads)
    return HeadScores(scores, scores)


def _mass(call: AttentionCall, positions: Positions) -> Tensor:
    """`[B, query heads]`: attention over values of one on images and zero elsewhere is the mass itself."""
    device = call.value.device
    image, text = positions.image.to(device), positions.text.to(device)
    marks = image[:, None, :, None].to(call.value.dtype).expand_as(call.value)
    mass = call.attend(marks)[..., 0].float().masked_fill(~text[:, :, None], 0)
    mean = mass.sum(1) / text.sum(1, keepdim=True).clamp_min(1)
    return mean.masked_fill(~(image.any(1) & text.any(1))[:, None], float("nan"))
