"""Integers of rotated tokens: no channel is an outlier after the rotation."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..kernels.stored_tokens import StoredTokens
from ..rotations import spreading_rotation
from .codec import Codec, Packed
from .minmax import MinMaxCodec


LARGEST_BLOCK = 128
TOKEN_UNIT = 2.0**-20
ROTATION_UNIT = 2.0**-24


def block_size(width: int) -> int:
    """Channels that one rotation mixes: the largest divisor of `width` of 32 to 128, else all."""
    divisors = (size for size in range(LARGEST_BLOCK, 31, -1) if width % size == 0)
    return width if width <= LARGEST_BLOCK else next(divisors, width)


@lru_cache(maxsize=64)
def rotation_constants(size: int, device: torch.device) -> dict[str, Tensor]:
    """`rotation [size, size]` fp32 (`x @ rotation` rotates), and `integers`: the same in units of 2^-24, fp64."""
    exact = spreading_rotation(size)
    wide = torch.float32 if device.type == "mps" else torch.float64  # which has no fp64
    return {
        "rotation": exact.to(device, torch.float32),
        "integers": (exact / ROTATION_UNIT).round().to(device, wide),
    }


@lru_cache(maxsize=64)
def whole_rotation(width: int, device: torch.device) -> Tensor:
    """`rotation` of `block_size(width)` channels on every block, `[width, width]` fp32."""
    size = block_size(width)
    rotation = rotation_constants(size, device)["rotation"]
    return rotation if size == width else torch.block_diag(*[rotation] * (width // size))


def to_integers(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`tokens [..., size]` as integers of at most 2^20 (in fp32) and the unit `[..., 1]` fp32 that they count."""
    tokens = tokens.float()
    unit = tokens.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) * TOKEN_UNIT
    return (tokens / unit).round(), unit


def rotate(integers: Tensor, rotation: Tensor) -> Tensor:
    """`integers @ R`, fp64, of `to_integers` and `rotation_constants(...)["integers"]`.

    Every partial sum is an integer below 2^20 2^24 sqrt(size) < 2^53, so that fp64 has it exactly and the order of
    the sums, which a matmul chooses by the number of tokens and the device, cannot matter: tokens rotated one by one
    equal tokens rotated together bit for bit. Twice as fast on a CPU as the butterfly of a fast Hadamard transform.
    """
    return (integers.to(rotation.dtype) @ rotation) * ROTATION_UNIT


class HadamardCodec(Codec):
    """`MinMaxCodec` of tokens rotated by `spreading_rotation` (QuaRot, arXiv 2404.00456), a block of channels each.

    Payload and scales are those of `MinMaxCodec`, as are range, arguments and errors; both hold for the rotated
    tokens. A token and head with a NaN or an infinity in a block of channels reads as NaN in all of that block, and of
    the groups that reach into it.
    """

    def __init__(self, width: int, bits: int, group_size: int | None = None, symmetric: bool = False):
        super().__init__(width)
        self.minmax = MinMaxCodec(width, bits, group_size, symmetric)
        self.blocks = (-1, block_size(width))

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.constants = rotation_constants(self.blocks[1], torch.device(device))

    def encode(self, tokens: Tensor) -> Packed:
        integers, unit = to_integers(tokens.unflatten(-1, self.blocks))
        return self.minmax.encode((rotate(integers, self.constants["integers"]).float() * unit).flatten(-2))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        # fp32 also for bf16, whose matmul takes ten times as long on a CPU.
        rotated = self.minmax.decode(packed, torch.float32).unflatten(-1, self.blocks)
        return (rotated @ self.constants["rotation"].T).flatten(-2).to(dtype)

    def stored(self, packed: Packed) -> StoredTokens:
        return self.minmax.stored(packed)

    def rotation(self) -> Tensor | None:
        return whole_rotation(self.width, self.constants["rotation"].device) if self.constants else None
