"""Integers between a token's smallest and largest number."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.packing import pack, padded_width, unpack_into
from ..kernels.stored_tokens import StoredTokens
from .codec import Codec, Packed


# Scales are fp16, and so may be what is read: this leaves room for the rounding of a scale.
LARGEST = 65440.0


class MinMaxCodec(Codec):
    """Uniform integers with a scale (and a zero) for each token, head and group of channels.

    Asymmetric: x ~ zero + code * scale, with zero = min and scale = (max - min) / (2^bits - 1), both rounded to fp16
    before the codes are computed. Symmetric: x ~ level * scale with integer levels around zero and the largest at
    amax: at 8 and 4 bits -127..127 and -7..7; at 3 and 2 bits the odd numbers of -7..7 and -3..3, which leave no code
    unused but have no zero. On Gaussian rows of width 64 these have a squared error of 0.047 and 0.256 of the
    variance, where -3..3 and -1..1 have 0.063 and 0.516.

    Payload `[B, H, N, packed_width(width, bits)]` uint8, symmetric 8 bit as two's complement; scales `[B, H, N, G]`
    (symmetric) or `[B, H, N, 2 G]` (scales, then zeros).

    Numbers beyond +-65440 are clamped. A group with a NaN or an infinity reads as NaN throughout; others are as ever.
    A scale that rounds to 0 reads as zero (min; symmetric: 0) throughout.

    Args:
        width: numbers a token and head.
        bits: 8, 4, 3 or 2.
        group_size: channels that share a scale, a divisor of width; None: all.
        symmetric: levels on both sides of 0 and half the scales, instead of levels from min to max.

    Raises:
        ValueError: a group_size that does not divide width.
    """

    def __init__(self, width: int, bits: int, group_size: int | None = None, symmetric: bool = False):
        super().__init__(width)
        if group_size is not None and (group_size < 1 or width % group_size):
            divisors = [number for number in range(1, width + 1) if width % number == 0]
            raise ValueError(
                f"group_size={group_size} is not allowed with width={width}; allowed: a divisor, one of {divisors}"
            )
        self.bits = bits
        self.symmetric = symmetric
        self.group_shape = (width // (group_size or width), group_size or width)
        # Symmetric: level = step * code - offset, for codes of lowest to highest.
        self.lowest, self.highest, self.step, self.offset = 0, 2**bits - 1, 1, 0
        if symmetric and bits == 8:
            self.lowest, self.highest = -127, 127
        elif symmetric and bits == 4:
            self.lowest, self.offset = 1, 8
        elif symmetric:
            self.step, self.offset = 2, self.highest
        self.largest_level = self.step * self.highest - self.offset
        # Codes that int8 can hold are read as such: converted to floats in half the time that uint8 takes.
        self.signed = symmetric or bits < 8

    def encode(self, tokens: Tensor) -> Packed:
        groups = tokens.float().unflatten(-1, self.group_shape)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        bad = (high - low) * 0  # NaN where the group has a non-finite number, else 0
        low, high = low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST)
        if self.symmetric:
            scale = (torch.maximum(high, -low) / self.largest_level + bad).half()
            scales, levels = scale, groups
        else:
            scale, zero = ((high - low) / self.highest + bad).half(), (low + bad).half()
            scales, levels = torch.cat([scale, zero], dim=-2), groups - zero.float()
        # A scale of 0 reads as 0 times any code.
        codes = levels / scale.float().clamp_min(torch.finfo(torch.float32).tiny)
        if self.offset:
            codes = codes.add_(self.offset).div_(self.step)
        codes = codes.round_().clamp_(self.lowest, self.highest).nan_to_num_(0)
        codes = codes.to(torch.int8 if self.signed else torch.uint8).view(torch.uint8)
        return Packed(pack(codes.flatten(-2), self.bits), scales.squeeze(-1))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        out = packed.payload.new_empty((*packed.payload.shape[:-1], self.width), dtype=dtype)
        self.decode_into(packed, out)
        return out

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        # code * scale may lie beyond fp16 where the sum does not; bf16 has too few bits for the sum at 8 bits.
        wide = out.dtype == torch.float16 or (out.dtype == torch.bfloat16 and self.bits == 8 and not self.symmetric)
        padded = padded_width(self.width, self.bits)
        # Computed in place wherever that can be: a cache-sized tensor more costs as much as an operation.
        values = out
        if wide or padded != self.width:
            dtype = torch.float32 if wide else out.dtype
            values = out.new_empty((*out.shape[:-1], padded), dtype=dtype)
        if self.bits == 8:
            values.copy_(packed.payload.view(torch.int8) if self.signed else packed.payload)
        else:
            unpack_into(packed.payload, values, self.bits)
        groups = values[..., : self.width].unflatten(-1, self.group_shape)
        scales = packed.scales.to(values.dtype).unsqueeze(-1)
        if self.symmetric:
            if self.offset:
                groups.mul_(self.step).sub_(self.offset)
            groups.mul_(scales)
        else:
            scale, zero = scales.chunk(2, dim=-2)
            groups.mul_(scale).add_(zero)
        if values is not out:
            out.copy_(values[..., : self.width])

    def stored(self, packed: Packed) -> StoredTokens:
        code = "symmetric" if self.symmetric else "asymmetric"
        return StoredTokens(packed.payload, packed.scales, self.width, code, self.bits)
