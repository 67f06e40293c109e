"""Directions of rotated tokens by the best scalar codebook of a Gaussian."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.packing import nibbles, pack, padded_width
from ..kernels.stored_tokens import StoredTokens
from .codec import Codec, Packed
from .hadamard import rotate, rotation_constants, to_integers


LARGEST = 65504.0  # of fp16
SQUARE_UNIT = 2.0**-36


@lru_cache(maxsize=8)
def normal_centroids(bits: int) -> tuple[float, ...]:
    """The 2^bits levels, ascending, that code a standard normal number with the least mean squared error.

    Lloyd-Max: in turn, borders half-way between levels, and levels at the mean of the normal between their borders,
    (phi(a) - phi(b)) / (Phi(b) - Phi(a)), until nothing moves by 1e-12. Positive half only; the other mirrors it.
    """

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    levels = [(number + 0.5) * 4 / 2**bits for number in range(2 ** (bits - 1))]
    moved = 1.0
    while moved > 1e-12:
        borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        means = [
            2 * (density(a) - density(b)) / (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2)))
            for a, b in pairwise(borders)
        ]
        moved, levels = max(abs(mean - level) for mean, level in zip(means, levels)), means
    return (*(-level for level in reversed(levels)), *levels)


@lru_cache(maxsize=64)
def codebook_constants(width: int, bits: int, device: torch.device) -> dict[str, Tensor]:
    """`rotation` and `integers` of `rotation_constants`, `centroids` and `midpoints` fp32, and

    `squares`: of the centroids, in fp64 but in units of 2^-36, whose sums are exact and so alike in any order;
    `table [256, codes a byte]` and `inverse [padded_width, width]`: see `TurboQuantCodec.decode`.
    """
    constants = rotation_constants(width, device)
    centroids = torch.tensor(normal_centroids(bits), dtype=torch.float64, device="cpu")
    together = 4 if bits == 2 else 2
    byte = torch.arange(256, device="cpu")
    fields = [byte >> number * 8 // together & 2**bits - 1 for number in range(together)]
    table = torch.stack([centroids[field] for field in fields], dim=-1)
    padded = padded_width(width, bits)
    inverse = torch.nn.functional.pad(constants["rotation"].T, (0, 0, 0, padded - width))
    inverse = inverse.unflatten(0, (together, padded // together)).transpose(0, 1).flatten(0, 1)
    return {
        **constants,
        "centroids": centroids.to(device, torch.float32),
        "midpoints": ((centroids[1:] + centroids[:-1]) / 2).to(device, torch.float32),
        "squares": ((centroids**2 / SQUARE_UNIT).round() * SQUARE_UNIT).to(device, constants["integers"].dtype),
        "table": table.to(device, torch.float32),
        "inverse": inverse.contiguous(),
    }


class TurboQuantCodec(Codec):
    """TurboQuant for mean squared error (arXiv 2504.19874, algorithm 1): a norm, and a direction by codebook.

    x R sqrt(width) / |x| is nearly standard normal in each coordinate; each is coded by the nearest of
    `normal_centroids`. The scale that is kept makes what is read as long as x was, which the codes alone do not. There
    is no QJL residual.

    Payload `[B, H, N, packed_width(width, bits)]` uint8, scales `[B, H, N, 1]`. A token and head with a NaN or an
    infinity reads as NaN throughout. Zero reads as zero. Scales, about |x| / sqrt(width), are clamped to fp16.

    Args:
        width: numbers a token and head.
        bits: 4, 3 or 2.
    """

    def __init__(self, width: int, bits: int):
        super().__init__(width)
        self.bits = bits

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.constants = codebook_constants(self.width, self.bits, torch.device(device))

    def encode(self, tokens: Tensor) -> Packed:
        integers, unit = to_integers(tokens)
        rotation = self.constants["integers"]
        norm = integers.to(rotation.dtype).square().sum(-1, keepdim=True).sqrt()  # exact sum, see rotate
        spread = rotate(integers, rotation) * (math.sqrt(self.width) / norm.clamp(min=1))
        codes = torch.bucketize(spread.float().nan_to_num(0), self.constants["midpoints"], out_int32=True)
        length = self.constants["squares"][codes].sum(-1, keepdim=True).sqrt()
        scales = (norm / length * unit).clamp(max=LARGEST).half()
        return Packed(pack(codes.to(torch.uint8), self.bits), scales)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        # One look-up gives the centroids of all codes of a byte; `inverse` has its rows in the order that this gives.
        index = nibbles(packed.payload, padded_width(self.width, 3)) if self.bits == 3 else packed.payload
        spread = torch.nn.functional.embedding(index.int(), self.constants["table"]).flatten(-2)
        return (spread @ self.constants["inverse"]).mul_(packed.scales).to(dtype)

    def stored(self, packed: Packed) -> StoredTokens:
        levels = self.constants["centroids"]
        return StoredTokens(packed.payload, packed.scales, self.width, "codebook", self.bits, levels=levels)

    def rotation(self) -> Tensor | None:
        return self.constants.get("rotation")
