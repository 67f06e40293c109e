"""Whitened per-head low-rank factors in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


def factorise(
    weight: Tensor, heads: int, rank: int, gram: Tensor, damping: float = 1e-4
) -> tuple[Tensor, Tensor | None]:
    """Best rank-`rank` factors of every head for inputs with second moment `gram`.

    Minimises `E |W_h x - U_h D_h x|^2`, the objective of activation-whitened SVD (WSVD, section 3). Its solution needs
    no Cholesky factor and no inverse: with `S = E[x x^T]`, `U_h` holds the leading eigenvectors of the head's output
    second moment `W_h S W_h^T` (head_dim x head_dim) and `D_h = U_h^T W_h`. It therefore exists for any calibration
    set, however small, and `U_h` is orthonormal.

    Args:
        weight: `[heads * head_dim, in_features]`.
        gram: `[in_features, in_features]`.
        damping: share of the mean input energy added in every direction.

    Returns:
        `down [heads, rank, in_features]` and `up [heads, head_dim, rank]` in fp32; `up` is None at
        `rank == head_dim`, where `down` is the weight itself.

    Raises:
        ValueError: for a weight with NaN or infinity.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity and cannot be factorised")
    per_head = weight.detach().unflatten(0, (heads, -1))
    if rank == per_head.shape[1]:
        return per_head.float(), None
    w = per_head.double()
    s = gram.to(w)
    energy = s.diagonal().mean()
    s = s + torch.eye(len(s), dtype=s.dtype, device=s.device) * (damping * energy if energy > 0 else 1.0)
    _, vectors = torch.linalg.eigh(w @ s @ w.transpose(1, 2))
    up = vectors.flip(-1)[..., :rank]
    return (up.transpose(1, 2) @ w).float(), up.float().contiguous()
