"""From measures of samples and query heads to scores of physical KV heads (HeadGuard, arXiv 2609.35800)."""

from __future__ import annotations

import torch
from torch import Tensor


ABSENT = float("-inf")  # the score of a head that a layer does not have


def sample_mean(measures: Tensor) -> Tensor:
    """Mean over the samples that count: `[samples, layers, heads]`, NaN for the others, to fp64 `[layers, heads]`."""
    return measures.double().nanmean(0)


def sensitivity_of(gradients: Tensor, kind: str) -> Tensor:
    """What the samples' gradients say of a head together.

    Args:
        gradients: with respect to the head's gate, `[samples, layers, heads]`; NaN for what was not measured.
        kind: "absolute" (mean of the absolute values, as in the paper), "squared", "signed", or "absolute_mean" (the
            absolute value of the mean).

    Returns:
        fp64 `[layers, heads]`.
    """
    gradients = gradients.double()
    if kind == "absolute":
        return sample_mean(gradients.abs())
    if kind == "squared":
        return sample_mean(gradients.square())
    mean = sample_mean(gradients)
    return mean if kind == "signed" else mean.abs()


def physical(scores: Tensor, num_key_value_heads: list[int]) -> Tensor:
    """Means over the query heads that share a KV head.

    Args:
        scores: `[layers, query heads]`, NaN where a layer has no such head.

    Returns:
        fp32 `[layers, KV heads]`, -inf where a layer has no such head.
    """
    result = torch.full((len(num_key_value_heads), max(num_key_value_heads)), ABSENT)
    for layer, heads in enumerate(num_key_value_heads):
        if heads:
            row = scores[layer][~scores[layer].isnan()]
            result[layer, :heads] = row.unflatten(0, (heads, -1)).mean(1)
    return result


def standardised(scores: Tensor, normalization: str = "global") -> Tensor:
    """z-scores over all heads, or over those of each "layer"; 0 where all are equal.

    Args:
        scores: `[layers, KV heads]`, -inf where a layer has no such head.
    """
    if normalization == "layer":
        return torch.cat([standardised(row[None]) for row in scores])
    present = scores != ABSENT
    held = scores[present].double()
    if not len(held):
        return scores
    deviation = held.std(correction=0)
    # Rounding alone is no difference between heads.
    flat = deviation <= 1e-12 * held.abs().max()
    z = torch.zeros_like(held) if flat else (held - held.mean()) / deviation
    result = torch.full_like(scores, ABSENT)
    result[present] = z.to(scores.dtype)
    return result
