"""Selector "key_range": heads whose keys are hard to quantize, the explanation that competes with sensitivity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import bound_layers
from ..quantizer_config import HeadGuardConfig
from .combination import physical, sample_mean, standardised
from .measuring import measured, require
from .observer import AttentionCall
from .positions import Positions
from .scoring import HeadScores, ScoringTask


RANGE, BIAS = "key_channel_range", "key_bias_norm"  # names in `ScoringTask.raw`


def key_range(task: ScoringTask) -> HeadScores:
    """z-score of the norm of a head's key bias plus z-score of the largest range of one of its key channels.

    Both are taken of what the cache keeps: keys after norm and rotation, or latents, which the bias is no part of. The
    range of a channel is its maximum minus its minimum over the tokens of a sample that guards are for
    (`HeadGuardConfig.tokens`). Without a bias the range alone counts.

    Leaves in `task.raw` `key_channel_range`, fp32 `[samples, layers, heads]` (NaN for rows without such tokens), and
    `key_bias_norm`, fp32 `[1, layers, heads]`.

    Raises:
        ValueError: no tokens of images in the data where guards are for these.
    """
    require(task, images=task.config.tokens == "image")
    bias = torch.full((len(task.num_key_value_heads), max(task.num_key_value_heads)), float("nan"))
    latent = bound_layers(task.model)
    for attention in task.attentions:
        own = getattr(attention.module.k_proj, "bias", None)
        if own is None or attention.layer in latent:
            bias[attention.layer, : attention.heads] = 0
        else:
            norms = own.detach().float().unflatten(0, (attention.heads, -1)).norm(dim=1)
            bias[attention.layer, : attention.heads] = norms.cpu()
    latents: dict[int, Tensor] = {}
    with _latents_kept(task, latent, latents):
        task.raw.update({RANGE: measured(task, partial(_range, task.config.tokens, latents)), BIAS: bias[None]})
    return combined(task.raw, task.num_key_value_heads, task.config)


def combined(raw: dict[str, Tensor], num_key_value_heads: list[int], config: HeadGuardConfig) -> HeadScores:
    """Scores from the samples' ranges and the norms."""
    ranges, norms = (physical(sample_mean(raw[name]), num_key_value_heads) for name in (RANGE, BIAS))
    scores = standardised(norms, config.normalization) + standardised(ranges, config.normalization)
    return HeadScores(scores, scores)


def _range(tokens: str, latents: dict[int, Tensor], call: AttentionCall, positions: Positions) -> Tensor:
    """`[B, heads]`: the largest range of a channel, NaN in rows without a token that counts."""
    kept = latents.pop(call.layer, call.key)
    counted = (positions.image if tokens == "image" else positions.attended).to(kept.device)
    left_out = ~counted[:, None, :, None]
    largest = kept.float().masked_fill(left_out, float("-inf")).amax(2)
    smallest = kept.float().masked_fill(left_out, float("inf")).amin(2)
    return (largest - smallest).amax(-1).masked_fill(~counted.any(1)[:, None], float("nan"))


@contextmanager
def _latents_kept(task: ScoringTask, layers: set[int], latents: dict[int, Tensor]) -> Iterator[None]:
    """Inside, every forward leaves the key latents `[B, heads, S, width]` of `layers` in `latents`."""

    def keep(layer: int, projection: nn.Module, args: tuple[Any, ...]) -> None:
        latents[layer] = projection.latents(args[0]).transpose(1, 2)

    hooks = [
        attention.module.k_proj.register_forward_pre_hook(partial(keep, attention.layer))
        for attention in task.attentions
        if attention.layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
