"""Orthogonal matrices that spread a head's outlier channels over all of them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), `[size, size]` fp64; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    if len(matrix) != size:
        raise ValueError(f"hadamard: size={size} is not allowed; allowed: a power of two")
    return matrix / size**0.5


@lru_cache(maxsize=64)
def spreading_rotation(size: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix `[size, size]`, fp64, each of whose entries is about 1/sqrt(size).

    Hadamard with random signs for a power of two; else the Kronecker product of a random orthogonal matrix of the odd
    part with a Hadamard matrix. `x @ R` rotates, `x @ R.T` rotates back. The same for the same size and seed, on any
    machine. Treat as constant.
    """
    power = size & -size  # largest power of two that divides size
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    odd = random_orthogonal(size // power, generator)
    return signs[:, None] * torch.kron(odd.contiguous(), hadamard(power))


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix `[size, size]`, fp64 (QR of a Gaussian one, signs fixed)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()
