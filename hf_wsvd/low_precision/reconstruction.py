"""One linear layer's weight with least output error once it is rounded: quantization-aware local fine-tuning.

The loss is `E|W x - Q(W') x^|^2` over calibration inputs x and what rounding makes of them, x^: a quadratic form in
second moments, so that no data are needed once these are known. Its rows are independent: Fisher information of the
outputs weighs whole rows and changes no row's best weight, which is why it plays no part here (but does for latents).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .moments import InputMoments
from .sequential_rounding import clipped_scales, rounded_sequentially
from .weights import LIMITS, fake_quantized_weight, weight_scales


BETAS = (0.9, 0.95)


@dataclass
class Reconstruction:
    """A rounded weight.

    Attributes:
        weight: `[out, in]` fp32, multiples of `scales`.
        scales: `[out, groups]` fp32.
        nearest, error: share of the outputs' energy that rounding to nearest loses, and that this weight loses.
    """

    weight: Tensor
    scales: Tensor
    nearest: float
    error: float


@torch.no_grad()
def reconstruct(
    weight: Tensor, moments: InputMoments, bits: int, group_size: int | None, steps: int, learning_rate: float
) -> Reconstruction:
    """The best of three for every row: rounding to nearest, sequential rounding, and what `steps` make of the latter.

    Args:
        weight: `[out, in]`, any float dtype.
        moments: with noise, as `regularised` gives them.
        steps: of Adam, with straight-through rounding, on fp32 masters and scales.
        learning_rate: the first steps' change of a weight, as share of the largest weight in its group.

    Raises:
        ValueError: a weight with NaN or infinity.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity")
    weight = weight.float()
    best = _Best(weight, moments, weight_scales(weight, bits, group_size), bits)
    nearest = best.errors.sum()
    wanted = moments.best_weight(weight).float()
    scales = clipped_scales(wanted, moments.rounded.diagonal(), bits, group_size)
    rounded = rounded_sequentially(wanted, moments.rounded, scales, bits)
    best.take(rounded, scales)
    best.take(fake_quantized_weight(wanted, bits, scales=scales), scales)
    _descend(best, moments, weight, bits, steps, learning_rate)
    energy = moments.energies(weight).sum().clamp_min(1e-30)
    return Reconstruction(best.weight, best.scales, float(nearest / energy), float(best.errors.sum() / energy))


class _Best:
    """The rows of least error so far."""

    def __init__(self, target: Tensor, moments: InputMoments, scales: Tensor, bits: int):
        self.target, self.moments = target, moments
        self.weight, self.scales = fake_quantized_weight(target, bits, scales=scales), scales.clone()
        self.errors = moments.errors(target, self.weight)

    def take(self, weight: Tensor, scales: Tensor) -> None:
        errors = self.moments.errors(self.target, weight)
        better = errors < self.errors
        self.weight = torch.where(better[:, None], weight, self.weight)
        self.scales = torch.where(better[:, None], scales, self.scales)
        self.errors = torch.where(better, errors, self.errors)


def _descend(best: _Best, moments: InputMoments, weight: Tensor, bits: int, steps: int, learning_rate: float) -> None:
    """Adam on masters in units of each group's largest weight, and on the scales' logarithms."""
    start = best.scales.clone()
    unit = (start * LIMITS[bits]).repeat_interleave(weight.shape[1] // start.shape[1], dim=1).clamp_min(1e-30)
    masters, factors = nn.Parameter(best.weight / unit), nn.Parameter(torch.zeros_like(start))
    wanted, moment = (weight.double() @ moments.cross).float(), moments.rounded.float()
    energies = moments.energies(weight).float().clamp_min(1e-30)
    optimizer = torch.optim.Adam([masters, factors], lr=learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    least = torch.full_like(energies, float("inf"))
    found, found_scales = best.weight.clone(), start.clone()
    for step in range(steps + 1):
        with torch.enable_grad():
            scales = start * factors.exp()
            rounded = fake_quantized_weight(masters * unit, bits, scales=scales)
        product = rounded.detach() @ moment
        errors = ((product - 2 * wanted) * rounded.detach()).sum(1)  # but for a constant
        better = errors < least
        least = torch.where(better, errors, least)
        found[better], found_scales[better] = rounded.detach()[better], scales.detach()[better]
        if step == steps:
            break
        # The gradient of a quadratic form, written out: autograd would multiply by the moment twice more.
        rounded.backward(2 * (product - wanted) / energies[:, None])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    best.take(found, found_scales)
