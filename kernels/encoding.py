"""How kernels turn tokens into codes, and the same in plain torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import pack, packed_width


TOKEN_UNIT = 2.0**-20
ROTATION_UNIT = 2.0**-24
LARGEST_FP8 = 448.0  # of float8_e4m3fn
LARGEST_FP16 = 65504.0
LARGEST_OF_GROUP = 65440.0  # whose scale, rounded to fp16, still reads as a finite fp16 number


class Encoding(NamedTuple):
    """What a scheme of storage makes of tokens `[B, H, n, width]`.

    Rotations are exact: tokens become integers of at most 2^20 in a unit of their own, which meet a rotation in whole
    units of 2^-24, and no sum passes 2^53. So codes depend on no order of summation, whatever computes them.

    Attributes:
        code: "fp8", "symmetric", "asymmetric" or "codebook", see `StoredTokens`.
        bits: of a code.
        width: numbers a token and head.
        groups: of channels with scales of their own; 0 for "fp8", 1 for "codebook".
        head_scales: fp32 `[H]` ("fp8"), or None for 1.
        rotation: int32 `[block, block]` in units of 2^-24, applied to every block of channels before coding; None for
            none. "codebook" has one, with `block = width`.
        midpoints: fp32 `[2^bits - 1]`, ascending: borders between neighbouring codes ("codebook"), or None.
        squares: fp64 `[2^bits]`: of what codes stand for, in whole units of 2^-36 ("codebook"), or None.
    """

    code: str
    bits: int
    width: int
    groups: int = 0
    head_scales: Tensor | None = None
    rotation: Tensor | None = None
    midpoints: Tensor | None = None
    squares: Tensor | None = None

    @property
    def payload_width(self) -> int:
        """Bytes of codes a token and head."""
        return packed_width(self.width, self.bits)

    @property
    def scales_width(self) -> int:
        """fp16 numbers beside them."""
        return self.groups * (2 if self.code == "asymmetric" else 1)


def level_range(code: str, bits: int) -> tuple[int, int, int, int]:
    """`(lowest, highest, step, offset)`: codes go from lowest to highest and stand for `step * code - offset`."""
    if code == "asymmetric":
        return 0, 2**bits - 1, 1, 0
    return {8: (-127, 127, 1, 0), 4: (1, 15, 1, 8), 3: (0, 7, 2, 7), 2: (0, 3, 2, 3)}[bits]


def encode_oracle(tokens: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Codes of `tokens [B, H, n, width]`: payload `[B, H, n, bytes]` uint8 and scales `[B, H, n, numbers]` fp16.

    In the order of operations and with the roundings of the kernels, which equal it bit for bit (but for the sign of
    zeros and NaNs). A group, for "codebook" a token and head, with a number that is not finite has NaN scales, codes
    of zero, and no effect on others.
    """
    numbers, unit = tokens.float(), None
    if encoding.rotation is not None:
        numbers, unit, squares = _rotated(numbers, encoding.rotation)
    if encoding.code == "codebook":
        return _by_codebook(numbers, unit, squares, encoding)
    if unit is not None:
        numbers = (numbers.float() * unit).flatten(-2)
    if encoding.code == "fp8":
        scales = 1 if encoding.head_scales is None else encoding.head_scales.view(-1, 1, 1)
        numbers = (numbers / scales).clamp(-LARGEST_FP8, LARGEST_FP8)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8), numbers.new_empty(
            (*numbers.shape[:-1], 0), dtype=torch.float16
        )
    return _by_groups(numbers, encoding)


def _rotated(numbers: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated blocks `[..., blocks, block]` fp64 and their units `[..., blocks, 1]` fp32; their sums of squares."""
    blocks = numbers.unflatten(-1, (-1, len(rotation)))
    unit = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) * TOKEN_UNIT
    integers = (blocks / unit).round().double()
    squares = integers.square().sum(-1, keepdim=True)
    return integers @ rotation.double() * ROTATION_UNIT, unit, squares


def _by_groups(numbers: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    lowest, highest, step, offset = level_range(encoding.code, encoding.bits)
    groups = numbers.unflatten(-1, (encoding.groups, -1))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    bad = ~(high - low).isfinite()
    low, high = low.clamp(-LARGEST_OF_GROUP, LARGEST_OF_GROUP), high.clamp(-LARGEST_OF_GROUP, LARGEST_OF_GROUP)
    if encoding.code == "symmetric":
        reach, zero = torch.maximum(high, -low), torch.zeros_like(low)
        scale = (reach / torch.full_like(reach, step * highest - offset)).half()
    else:
        scale, zero = ((high - low) / torch.full_like(low, highest)).half(), low.half()
    levels = (groups - zero.float()) / scale.float().clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((levels + offset) / step).round().clamp(lowest, highest)
    codes = codes.masked_fill(bad, 0).to(torch.int16).bitwise_and(255).to(torch.uint8)
    scales = [scale] if encoding.code == "symmetric" else [scale, zero]
    scales = torch.cat([part.masked_fill(bad, math.nan) for part in scales], dim=-2).squeeze(-1)
    return pack(codes.flatten(-2), encoding.bits), scales


def _by_codebook(rotated: Tensor, unit: Tensor, squares: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    rotated, unit, norm = rotated.squeeze(-2), unit.squeeze(-2), squares.squeeze(-2).sqrt()
    spread = rotated * (norm.clamp(min=1).reciprocal() * math.sqrt(encoding.width))
    codes = torch.bucketize(spread.float().nan_to_num(0), encoding.midpoints)
    length = encoding.squares[codes].sum(-1, keepdim=True).sqrt()
    scales = (norm / length * unit).clamp(max=LARGEST_FP16).half()
    return pack(codes.to(torch.uint8), encoding.bits), scales
