"""Weights rounded one input channel after the other, each error made good by the channels that follow.

GPTQ (Frantar et al., arXiv 2210.17323, algorithm 1) on second moments of rounded inputs, with clipped scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weights import LIMITS, SMALLEST, weight_scales


BLOCK = 128  # channels whose errors reach the rest of the row in one product
CLIPPING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of the largest value


def clipped_scales(weight: Tensor, energies: Tensor, bits: int, group_size: int | None) -> Tensor:
    """Scales `[out, groups]` fp32 with least rounding error, each input channel counted by its energy `[in]`."""
    largest = weight_scales(weight, bits, group_size)
    groups = weight.float().unflatten(1, (largest.shape[1], -1))
    shares = (energies / energies.mean().clamp_min(1e-30)).float().view(largest.shape[1], -1)
    best, least = largest, torch.full_like(largest, float("inf"))
    for share in CLIPPING:
        scales = (largest * share).clamp_min(SMALLEST)[..., None]
        rounded = (groups / scales).round().clamp(-LIMITS[bits], LIMITS[bits]) * scales
        error = ((rounded - groups).square() * shares).sum(-1)
        best, least = torch.where(error < least, largest * share, best), torch.minimum(error, least)
    return best


def rounded_sequentially(weight: Tensor, moment: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Multiples of the scales `[out, in]` fp32 with a small error `(q - w) M (q - w)^T` in every row.

    Args:
        weight: `[out, in]`.
        moment: M, `[in, in]` fp64, positive definite.
        scales: `[out, groups]` fp32.
    """
    limit, width = LIMITS[bits], weight.shape[1]
    size = width // scales.shape[1]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    left = weight.float().clone()
    result = torch.empty_like(left)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = left.new_empty(len(left), stop - start)
        for channel in range(start, stop):
            scale = scales[:, channel // size]
            codes = (left[:, channel] / scale.clamp_min(SMALLEST)).round().clamp(-limit, limit)
            result[:, channel] = codes * scale
            errors[:, channel - start] = (left[:, channel] - result[:, channel]) / factor[channel, channel]
            later = slice(channel + 1, stop)
            left[:, later] -= errors[:, channel - start, None] * factor[channel, later]
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return result
