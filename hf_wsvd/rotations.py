"""Orthogonal matrices that spread a head's outlier channels over all of them."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), `[size, size]` fp64; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    if len(matrix) != size:
        raise ValueError(f"hadamard: size={size} is not allowed; allowed: a power of two")
    return matrix / size**0.5


@lru_cache(maxsize=64)
def spreading_rotation(size: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix `[size, size]`, fp64, none of whose entries is larger than sqrt(2 / size).

    Hadamard with random signs for a power of two; else the Kronecker product of a Hadamard matrix with the Hartley
    matrix of the odd part. A random orthogonal matrix in its place spreads worse: of a 3 x 3 one, a single entry can
    be nearly 1. `x @ R` rotates, `x @ R.T` rotates back. The same for the same size and seed, on any machine, and
    always on the CPU: models are built under other default devices. Treat as constant.
    """
    power = size & -size  # largest power of two that divides size
    return spreading_signs(size, seed)[:, None] * torch.kron(hadamard(power), hartley(size // power))


def spreading_signs(size: int, seed: int = 0) -> Tensor:
    """The signs of the rows of `spreading_rotation(size, seed)`, `[size]` fp64."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 2, (size,), generator=generator, device="cpu").double() * 2 - 1


def hartley(size: int) -> Tensor:
    """The matrix of the discrete Hartley transform over sqrt(size), `[size, size]` fp64: symmetric and orthogonal.

    Its first row is constant: the first channel, the largest of an SVD's, is spread over all alike.
    """
    number = torch.arange(size, dtype=torch.float64, device="cpu")
    angle = 2 * math.pi * torch.outer(number, number) / size
    return (angle.cos() + angle.sin()) / size**0.5
