"""Per-head low-rank factors in closed form: best for a second moment on either side of the weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..rotations import spreading_rotation


SMALLEST_SHARE = 1e-6  # of the largest gradient that any direction of a head is taken to have


@dataclass(frozen=True)
class Spectrum:
    """What a head's output is made of, most important directions first.

    Attributes:
        basis: `[heads, head_dim, head_dim]` fp64; its columns span what any rank keeps.
        dual: `[heads, head_dim, head_dim]` fp64, the transposed inverse of `basis`.
        energy: `[heads, head_dim]` fp64, not negative, descending: what leaving out a direction costs.
    """

    basis: Tensor
    dual: Tensor
    energy: Tensor

    def tails(self) -> Tensor:
        """`[head_dim + 1]` fp64: half the energy beyond each rank, summed over heads; the last entry is 0.

        With a `weighting` of gradients this is the second-order estimate of the loss that a rank adds, in nats for one
        sequence's answer.
        """
        total = self.energy.sum(0)
        return torch.cat([total.flip(0).cumsum(0).flip(0), total.new_zeros(1)]) / 2


def spectrum(moment: Tensor, weighting: Tensor | None = None) -> Spectrum:
    """Directions of a head's output by `tr(A P M P^T)`, the loss of leaving them out.

    Args:
        moment: `[heads, head_dim, head_dim]`, second moment `M` of each head's output.
        weighting: `[heads, head_dim, head_dim]`, positive definite `A`: how much the loss minds an error in each
            direction of the output. None minds all alike.

    With `A = R R` the directions are the eigenvectors of `R M R`, led by `R^-1`. No Cholesky factor is needed, so a
    singular moment (fewer tokens than dimensions) is no special case.
    """
    moment = moment.double()
    if weighting is None:
        energy, vectors = torch.linalg.eigh(moment)
        vectors = vectors.flip(-1)
        return Spectrum(vectors, vectors, energy.flip(-1).clamp_min(0))
    values, rotation = torch.linalg.eigh(weighting.double())
    # Sums in fp32 leave noise, of either sign, where no gradient was measured; the inverse would blow it up.
    values = values.clamp_min(SMALLEST_SHARE * values.amax(-1, keepdim=True)).clamp_min(torch.finfo(values.dtype).tiny)
    root = (rotation * values.sqrt()[:, None]) @ rotation.mT
    inverse = (rotation * values.rsqrt()[:, None]) @ rotation.mT
    energy, vectors = torch.linalg.eigh(root @ moment @ root)
    vectors = vectors.flip(-1)
    return Spectrum(inverse @ vectors, root @ vectors, energy.flip(-1).clamp_min(0))


def factorise(weight: Tensor, rank: int, parts: Spectrum) -> tuple[Tensor, Tensor | None]:
    """Factors of every head that keep the `rank` leading directions of `parts`.

    Minimises `E[(W_h x - U_h D_h x)^T A_h (W_h x - U_h D_h x)]`: activation-whitened SVD (WSVD, section 3) without a
    weighting, and with one also the Kronecker-factored Fisher of the weight.

    Args:
        weight: `[heads * head_dim, in_features]`.

    Returns:
        `down [heads, rank, in_features]` and `up [heads, head_dim, rank]` with orthonormal columns, in fp32; `up` is
        None at `rank == head_dim`, where `down` is the weight itself.

    Raises:
        ValueError: for a weight with NaN or infinity, or statistics that make factors so.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity and cannot be factorised")
    heads, head_dim = parts.energy.shape
    per_head = weight.detach().unflatten(0, (heads, head_dim))
    if rank == head_dim:
        return per_head.float(), None
    up = parts.basis[..., :rank].to(weight.device)
    down = parts.dual[..., :rank].mT.to(weight.device) @ per_head.double()
    down, up = orthonormal(down, up)
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise ValueError("its factors are not finite: the statistics hold numbers that are too far apart")
    return down, up


def orthonormal(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with orthonormal columns in `up`, in fp32: latents then keep the scale of the heads."""
    up, triangle = torch.linalg.qr(up.double())
    return (triangle @ down.double()).float(), up.float().contiguous()


def spread(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with latents turned by `spreading_rotation`: `(U_h R) (R^T D_h)`, in fp32.

    Channels that descended in size are then about even (as Palu, arXiv 2407.21118, turns its latents), and columns of
    `up` stay orthonormal. All heads of a rank share the rotation: one for each head evens them no better.
    """
    rotation = spreading_rotation(up.shape[-1]).to(up.device)
    return (rotation.mT @ down.double()).float(), (up.double() @ rotation).float()
