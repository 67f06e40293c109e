"""Low-rank factors refined towards the entries of a weight that the loss depends on.

The objective is that of WSVD's local weighted fine-tuning (arXiv 2604.02570): the error of every entry of a projection
weight counts by its Fisher information `F = E[g * g]`, g the gradient of a sample's loss with respect to that entry,

    loss = mean((F^0.5 * (U_h D_h - W_h))^2) / mean((F^0.5 * W_h)^2)        over all heads of the projection together,

0 for a perfect fit, 1 for factors of zeros. It needs no data once F is known. Two solvers:

- `refine_alternating`, the one to use: exact weighted least squares for one factor after the other.
- `refine_adam`: the paper's solver, gradient steps on both factors, for comparison.

The objective does not know the inputs' second moment; that enters by the start, the whitened factors of `factorise`.

Both return factors of which `up` has orthonormal columns (QR of `up`, the triangle folded into `down`). The product is
the same, but latents then have the norm of the rebuilt head: an error made in quantizing them is not amplified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .factorise import orthonormal


@dataclass
class Refined:
    """Factors after refinement.

    Attributes:
        down: `[heads, rank, in_features]` fp32.
        up: `[heads, head_dim, rank]` fp32, with orthonormal columns.
        losses: the loss at the start and after every iteration or step, of the best factors so far: it never rises,
            and its last entry is the loss of `down` and `up`.
    """

    down: Tensor
    up: Tensor
    losses: list[float]


def fisher_loss(weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor) -> float:
    """The objective: the share of the weight's Fisher-weighted energy that the factors miss.

    0 where no entry has any Fisher information, as then no error counts.

    Args:
        weight: `[heads * head_dim, in_features]`.
        fisher: Fisher information of every entry of `weight`, same shape, not negative; its unit does not matter.
        down: `[heads, rank, in_features]`.
        up: `[heads, head_dim, rank]`.

    Raises:
        ValueError: for shapes that do not belong together, a negative `fisher`, NaN or infinity.
    """
    weight, fisher, down, up = _prepared(weight, fisher, down, up)
    return _relative(_head_errors(weight, fisher, down, up), weight, fisher)


@torch.no_grad()
def refine_alternating(
    weight: Tensor,
    fisher: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    iterations: int = 10,
    ridge: float = 1e-6,
    tolerance: float = 1e-4,
    workspace: int = 256 * 2**20,
) -> Refined:
    """Alternating weighted least squares.

    With `up` fixed every column of `down` is a least-squares problem of `rank` unknowns; with `down` fixed every row
    of `up` is one. Each is solved for the *change* of its unknowns, with a ridge on that change: what zeros of
    `fisher`, single ones or whole rows and columns, leave open keeps its start. A solution that does not lower its
    column's or row's error is dropped, so the loss never rises.

    Args:
        weight: as for `fisher_loss`, like `fisher`; the work is done on its device, in fp64.
        down: the start, like `up` of the shape given there.
        iterations: at most this many; one solves for `down`, then for `up`.
        ridge: share of each unknown's own curvature that is added to it.
        tolerance: a head is finished when an iteration lowers its error by less than this share.
        workspace: bytes for the linear systems. Besides these a few copies of one head's weight are held, and fp32
            copies of the arguments.

    Raises:
        ValueError: as `fisher_loss`, and for a `ridge` or `workspace` that is not positive.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive, not {ridge}")
    if workspace <= 0:
        raise ValueError(f"workspace must be a positive number of bytes, not {workspace}")
    weight, fisher, down, up = _prepared(weight, fisher, down, up)
    down, up = orthonormal(down, up)
    errors = []
    # Heads share nothing, and one gives a device enough to do: one after the other keeps the memory small.
    for head in range(len(down)):
        history = [_head_error(weight[head], fisher[head], down[head], up[head])]
        for _ in range(iterations):
            candidate = _alternation(weight[head], fisher[head], down[head], up[head], ridge, workspace)
            error = _head_error(weight[head], fisher[head], *candidate)
            if not error < history[-1]:
                break
            down[head], up[head] = candidate
            history.append(error)
            if history[-2] - error < tolerance * history[-2]:
                break
        errors.append(history)
    longest = max(map(len, errors))
    padded = torch.stack([torch.stack(history + history[-1:] * (longest - len(history))) for history in errors])
    return Refined(down, up, [_relative(column, weight, fisher) for column in padded.T])


@torch.no_grad()
def refine_adam(
    weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor, *, steps: int = 100, learning_rate: float = 1e-4
) -> Refined:
    """The paper's solver: Adam on both factors of all heads together, on fp32 masters.

    The learning rate is absolute: what a step changes depends on how the scale is split between the factors passed.
    The best factors of every head are kept, so the loss is never above the start's. Arguments and errors are those of
    `refine_alternating`; the work is done on the device of `weight`.
    """
    weight, fisher, down, up = _prepared(weight, fisher, down, up)
    start_down, start_up = orthonormal(down, up)
    start = lowest = _head_errors(weight, fisher, start_down, start_up)
    best_down, best_up = down.clone(), up.clone()
    energy = (fisher * weight.square()).sum(dtype=torch.float64)
    # The gradient of the loss, not of the error: Adam's epsilon has a scale.
    scale = (2 / torch.where(energy > 0, energy, 1.0)).float()
    optimizer = torch.optim.Adam([down, up], lr=learning_rate)
    losses = [_relative(start, weight, fisher)]
    for _ in range(steps):
        # Written out, as a caller may be in inference mode, where autograd cannot be switched on.
        gradient = (up @ down).sub_(weight).mul_(fisher).mul_(scale)
        down.grad, up.grad = up.mT @ gradient, gradient @ down.mT
        optimizer.step()
        errors = _head_errors(weight, fisher, down, up)
        better = errors < lowest
        lowest = torch.where(better, errors, lowest)
        best_down[better], best_up[better] = down[better], up[better]
        losses.append(_relative(lowest, weight, fisher))
    best_down, best_up = orthonormal(best_down, best_up)
    # Balancing rounds; a head that gained nothing else has its start back.
    worse = ~(_head_errors(weight, fisher, best_down, best_up) < start)
    best_down[worse], best_up[worse] = start_down[worse], start_up[worse]
    losses[-1] = _relative(_head_errors(weight, fisher, best_down, best_up), weight, fisher)
    return Refined(best_down, best_up, losses)


def _alternation(
    weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor, ridge: float, workspace: int
) -> tuple[Tensor, Tensor]:
    """`down` and then `up` of one head, solved for and balanced."""
    # fp64: fp32 would do, but its products obey global switches (TF32, bfloat16), with which this can stall.
    weight, fisher, down, up = weight.double(), fisher.double(), down.double(), up.double()
    down = down + _least_squares(up, fisher.mT, (weight - up @ down).mT, ridge, workspace).mT
    up = up + _least_squares(down.mT, fisher, weight - up @ down, ridge, workspace)
    return orthonormal(down, up)


def _least_squares(basis: Tensor, fisher: Tensor, residual: Tensor, ridge: float, workspace: int) -> Tensor:
    """`x [m, rank]` with least `sum_n fisher[m, n] (residual[m, n] - basis[n] . x[m])^2`; 0 where it gains nothing."""
    rank = basis.shape[1]
    # The systems are symmetric: their lower triangles come from one product with all pairs of basis columns.
    first, second = torch.tril_indices(rank, rank, device=basis.device)
    pairs, numbers = len(first), workspace // (2 * basis.element_size())
    solved = []
    systems_at_once = max(1, numbers // (pairs + 3 * rank * rank))
    terms_at_once = max(1, numbers // (2 * pairs))
    for at in range(0, len(fisher), systems_at_once):
        weights, errors = fisher[at : at + systems_at_once], residual[at : at + systems_at_once]
        triangles = basis.new_zeros(len(weights), pairs)
        for terms, share in zip(basis.split(terms_at_once), weights.split(terms_at_once, dim=1)):
            triangles.addmm_(share, terms[:, first].mul_(terms[:, second]))
        systems = basis.new_empty(len(weights), rank, rank)
        systems[:, first, second] = triangles
        systems[:, second, first] = triangles
        # Unit diagonal: weights and basis columns of very different size then cost no digits. Unknowns that no weight
        # touches have an empty row and a right side of zero: the ridge alone makes them stay.
        diagonal = systems.diagonal(dim1=1, dim2=2)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), 1.0)
        systems.mul_(scale[:, :, None]).mul_(scale[:, None, :])
        systems.diagonal(dim1=1, dim2=2).add_(ridge)
        triangle, failed = torch.linalg.cholesky_ex(systems)
        right = scale * ((weights * errors) @ basis)
        change = scale * torch.cholesky_solve(right[:, :, None], triangle)[:, :, 0]
        before = (weights * errors.square()).sum(1)
        after = (weights * (errors - change @ basis.mT).square()).sum(1)
        solved.append(torch.where(((failed == 0) & (after < before))[:, None], change, 0.0))
    return torch.cat(solved)


def _head_error(weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """`sum(F * (U_h D_h - W_h)^2)` of one head, in fp64."""
    return (fisher * (up.double() @ down.double() - weight).square()).sum()


def _head_errors(weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The same of every head, `[heads]`."""
    return torch.stack([_head_error(*head) for head in zip(weight, fisher, down, up)])


def _relative(errors: Tensor, weight: Tensor, fisher: Tensor) -> float:
    """The loss, from the errors of all heads."""
    error, energy = errors.sum().item(), (fisher * weight.square()).sum(dtype=torch.float64).item()
    if energy > 0:
        return error / energy
    return float("inf") if error > 0 else 0.0


def _prepared(weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked fp32 copies on the weight's device: weight and Fisher by heads, Fisher with a maximum of 1."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [heads * head_dim, in_features], not {list(weight.shape)}")
    if fisher.shape != weight.shape:
        raise ValueError(f"fisher must have the shape of weight, {list(weight.shape)}, not {list(fisher.shape)}")
    if down.dim() != 3 or 0 in down.shape or down.shape[2] != weight.shape[1] or len(weight) % len(down):
        raise ValueError(
            f"down must be [heads, rank, in_features] and fit weight {list(weight.shape)}, not {list(down.shape)}"
        )
    heads, rank, _ = down.shape
    expected = [heads, len(weight) // heads, rank]
    if list(up.shape) != expected:
        raise ValueError(f"up must be [heads, head_dim, rank], {expected}, not {list(up.shape)}")
    if rank > expected[1]:
        raise ValueError(f"down has rank {rank}, more than the head_dim of {expected[1]}")
    named = {"weight": weight, "fisher": fisher, "down": down, "up": up}
    for name, tensor in named.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity")
    if (fisher < 0).any():
        raise ValueError("fisher is negative: it is a mean of squares")
    weight, fisher, down, up = (t.detach().to(weight.device, torch.float32, copy=True) for t in named.values())
    # Squared gradients may be so small that their products with squared errors underflow.
    largest = fisher.max()
    fisher = fisher / torch.where(largest > 0, largest, 1.0)
    return weight.unflatten(0, (heads, -1)), fisher.unflatten(0, (heads, -1)), down, up
