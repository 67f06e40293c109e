"""A low-rank projection whose down factor is rounded: both factors and a rotation of the latents, learned together.

The loss of head h is `E |W_h x - U_h S_h Q(S_h^T D_h) x^|^2` in the metric of the loss's second-order expansion, the
second moment of the gradient at the head's outputs (together with the inputs' moment this is the Kronecker-factored
Fisher information). S_h, orthogonal and `[rank, rank]`, is S2 of WSVD (arXiv 2604.02570, section 3.3); it ends up in
both factors and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..modules import LatentProjection
from .moments import InputMoments
from .reconstruction import BETAS
from .sequential_rounding import clipped_scales, rounded_sequentially
from .weights import LIMITS, fake_quantized_weight, weight_scales


UP_RIDGE = 1e-4  # of the latents' mean energy
FISHER_FLOOR = 1e-2  # of its mean eigenvalue: no direction of a head's outputs is free
ROTATION_STEP = 0.05  # radians, at most, of a Cayley step


@dataclass
class LatentReconstruction:
    """Factors of which `weight` is rounded.

    Attributes:
        weight: `[heads * rank, in]` fp32, multiples of `scales [heads * rank, groups]`.
        up: `[heads, head_dim, rank]` fp32.
        nearest, error: share of the outputs' (weighted) energy that rounding to nearest loses, and that these lose.
    """

    weight: Tensor
    scales: Tensor
    up: Tensor
    nearest: float
    error: float


@torch.no_grad()
def reconstruct_latents(
    projection: LatentProjection,
    moments: InputMoments,
    bits: int,
    group_size: int | None,
    steps: int,
    learning_rate: float,
    *,
    fisher: Tensor | None = None,
) -> LatentReconstruction:
    """The best factors found for every head; those that rounding to nearest gives are among the candidates.

    Args:
        projection: with all heads cut.
        moments: with noise, as `regularised` gives them.
        steps, learning_rate: as of `reconstruct`.
        fisher: `[heads, head_dim, head_dim]`; None: every direction of the outputs counts alike.

    Raises:
        ValueError: factors with NaN or infinity.
    """
    if not (torch.isfinite(projection.weight).all() and torch.isfinite(projection.up).all()):
        raise ValueError("the factors hold NaN or infinity")
    loss = _LatentLoss(projection, moments, fisher)
    down, up = projection.weight.float(), projection.up.float()
    best = _Best(loss, fake_quantized_weight(down, bits, group_size), weight_scales(down, bits, group_size), up)
    nearest = best.errors.sum()
    wanted = moments.best_weight(down).float()
    scales = clipped_scales(wanted, moments.rounded.diagonal(), bits, group_size)
    rounded = rounded_sequentially(wanted, moments.rounded, scales, bits)
    best.take(rounded, scales, loss.best_up(rounded))
    _descend(best, loss, down, up, bits, group_size, steps, learning_rate)
    best.take(best.down.flatten(0, 1), best.scales.flatten(0, 1), loss.best_up(best.down.flatten(0, 1)))
    energy = loss.energy.sum().clamp_min(1e-30)
    return LatentReconstruction(
        best.down.flatten(0, 1),
        best.scales.flatten(0, 1),
        best.up,
        float(nearest / energy),
        float(best.errors.sum() / energy),
    )


class _LatentLoss:
    """The loss of all heads as a function of factors."""

    def __init__(self, projection: LatentProjection, moments: InputMoments, fisher: Tensor | None):
        self.heads, self.rank = projection.heads, projection.rank
        self.moments = moments
        down = projection.weight.double().unflatten(0, (self.heads, self.rank))
        self.target = projection.up.double() @ down  # [heads, head_dim, in]
        self.fisher = _metric(fisher, projection)
        self.wanted = self.target @ moments.cross
        self.energy = self._weighted(self.target @ moments.exact, self.target)

    def _weighted(self, left: Tensor, right: Tensor) -> Tensor:
        """`tr(F_h left_h right_h^T)` of every head."""
        return ((self.fisher @ left) * right).sum((1, 2))

    def errors(self, down: Tensor, up: Tensor) -> Tensor:
        """`[heads]` fp64, of rounded factors `down [heads * rank, in]` and `up [heads, head_dim, rank]`."""
        rebuilt = up.double() @ down.double().unflatten(0, (self.heads, self.rank))
        return self.energy + self._weighted(rebuilt @ self.moments.rounded - 2 * self.wanted, rebuilt)

    def best_up(self, down: Tensor) -> Tensor:
        """`up` of least loss, whatever the metric, for a rounded `down`; fp32."""
        down = down.double().unflatten(0, (self.heads, self.rank))
        latents = down @ self.moments.rounded @ down.mT
        ridge = UP_RIDGE * latents.diagonal(dim1=1, dim2=2).mean(1) + 1e-30
        latents = latents + ridge[:, None, None] * torch.eye(self.rank, dtype=latents.dtype, device=latents.device)
        return torch.linalg.solve(latents, down @ self.wanted.mT).mT.float()


class _Best:
    """The factors of least loss so far, head by head."""

    def __init__(self, loss: _LatentLoss, down: Tensor, scales: Tensor, up: Tensor):
        self.loss, self.shape = loss, (loss.heads, loss.rank)
        self.down, self.scales = down.unflatten(0, self.shape), scales.unflatten(0, self.shape)
        self.up, self.errors = up, loss.errors(down, up)

    def take(self, down: Tensor, scales: Tensor, up: Tensor) -> None:
        errors = self.loss.errors(down, up)
        better = (errors < self.errors)[:, None, None]
        self.down = torch.where(better, down.unflatten(0, self.shape), self.down)
        self.scales = torch.where(better, scales.unflatten(0, self.shape), self.scales)
        self.up = torch.where(better, up, self.up)
        self.errors = torch.minimum(errors, self.errors)


def _descend(
    best: _Best,
    loss: _LatentLoss,
    down: Tensor,
    up: Tensor,
    bits: int,
    group_size: int | None,
    steps: int,
    learning_rate: float,
) -> None:
    """Adam on both factors and Cayley steps on the rotations, with straight-through rounding."""
    unit = (weight_scales(down, bits, None).amax(1, keepdim=True) * LIMITS[bits]).clamp_min(1e-30)
    wanted_down = loss.moments.best_weight(down).float()
    masters, ups = nn.Parameter(wanted_down / unit), nn.Parameter(up.clone())
    eye = torch.eye(loss.rank, device=down.device).expand(loss.heads, -1, -1)
    rotations = nn.Parameter(eye.clone())
    moment, wanted, fisher = loss.moments.rounded.float(), loss.wanted.float(), loss.fisher.float()
    energy = loss.energy.float().clamp_min(1e-30)
    optimizer = torch.optim.Adam([masters, ups], lr=learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for step in range(steps + 1):
        with torch.enable_grad():
            turned = (rotations.mT @ (masters * unit).unflatten(0, (loss.heads, loss.rank))).flatten(0, 1)
            scales = weight_scales(turned, bits, group_size)
            rounded = fake_quantized_weight(turned, bits, scales=scales)
            turned_up = ups @ rotations
            rebuilt = turned_up @ rounded.unflatten(0, (loss.heads, loss.rank))
            error = ((fisher @ (rebuilt @ moment - 2 * wanted)) * rebuilt).sum((1, 2)) / energy
            total = error.sum()
        best.take(rounded.detach(), scales.detach(), turned_up.detach())
        if step == steps:
            break
        total.backward()
        optimizer.step()
        rotations.data.copy_(cayley_step(rotations.data, rotations.grad, ROTATION_STEP * (1 - step / steps)))
        schedule.step()
        optimizer.zero_grad()
        rotations.grad = None


def cayley_step(rotation: Tensor, gradient: Tensor, step: float) -> Tensor:
    """A step downhill that stays on the orthogonal matrices `[..., n, n]`.

    `(I + a/2 K)^-1 (I - a/2 K) R` with the skew `K = G R^T - R G^T` (Wen and Yin 2013, equation 2.5), scaled so that
    no plane turns by more than about `step` radians.
    """
    skew = gradient @ rotation.mT
    skew = skew - skew.mT
    size = torch.linalg.matrix_norm(skew, ord=2)[..., None, None].clamp_min(1e-30)
    half = skew * (step / 2 / size)
    eye = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    return torch.linalg.solve(eye + half, (eye - half) @ rotation)


def _metric(fisher: Tensor | None, projection: LatentProjection) -> Tensor:
    """`[heads, head_dim, head_dim]` fp64, positive definite, of mean eigenvalue 1."""
    device = projection.weight.device
    eye = torch.eye(projection.head_dim, dtype=torch.float64, device=device)
    if fisher is None:
        return eye.expand(projection.heads, -1, -1)
    fisher = fisher.to(device, torch.float64)
    mean = fisher.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return torch.where(mean > 0, fisher / mean.clamp_min(1e-300), eye) + FISHER_FLOOR * eye
