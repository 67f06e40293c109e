"""Selectors that look at no data: "random" and "boundary_layers"."""

from __future__ import annotations

import torch

from .scoring import HeadScores, ScoringTask


def random(task: ScoringTask) -> HeadScores:
    """Uniform scores, the same for the same `HeadGuardConfig.seed`."""
    generator = torch.Generator().manual_seed(task.config.seed)
    heads = task.num_key_value_heads
    scores = torch.rand(len(heads), max(heads), generator=generator)
    scores = task.scores_of({layer: scores[layer, :count] for layer, count in enumerate(heads)})
    return HeadScores(scores, scores)


def boundary_layers(task: ScoringTask) -> HeadScores:
    """Heads of the first layer, then of the last, the second, the last but one, ..., of layers with keys."""
    layers = [layer for layer, count in enumerate(task.num_key_value_heads) if count]
    by_layer = {}
    for place in range(len(layers)):
        layer = layers[place // 2] if place % 2 == 0 else layers[-1 - place // 2]
        by_layer[layer] = torch.full((task.num_key_value_heads[layer],), float(len(layers) - place))
    scores = task.scores_of(by_layer)
    return HeadScores(scores, scores)
