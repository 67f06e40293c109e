"""Codes of 8, 4, 3 and 2 bits side by side in bytes, in planes rather than interleaved.

With `W` the width rounded up to whole bytes, 4 bit: byte j holds codes j and j + W/2, the former in the low nibble;
2 bit: codes j, j + W/4, j + W/2 and j + 3W/4 from the low bits up; 3 bit: a plane of the two low bits in the 2-bit
layout, then a plane of the high bits, byte j of which holds those of codes j, j + W/8, ..., j + 7W/8. So one shift and
one mask give a run of codes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


# Codes that fill whole bytes.
CODES_A_UNIT = {8: 1, 4: 2, 3: 8, 2: 4}


def padded_width(width: int, bits: int) -> int:
    """`width` rounded up to codes that fill whole bytes. ValueError for bits other than 8, 4, 3 and 2."""
    if bits not in CODES_A_UNIT:
        raise ValueError(f"bits={bits!r} is not allowed; allowed: one of {tuple(CODES_A_UNIT)}")
    return -(-width // CODES_A_UNIT[bits]) * CODES_A_UNIT[bits]


def packed_width(width: int, bits: int) -> int:
    """Bytes that `width` codes take. ValueError for bits other than 8, 4, 3 and 2."""
    return padded_width(width, bits) * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., width]` uint8, each below 2^bits, as `[..., packed_width(width, bits)]` uint8.

    Raises:
        ValueError: bits other than 8, 4, 3 and 2.
    """
    missing = padded_width(codes.shape[-1], bits) - codes.shape[-1]
    if missing:
        codes = pad(codes, (0, missing))
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([_pack_plane(codes & 3, 2), _pack_plane(codes >> 2, 1)], dim=-1)
    return _pack_plane(codes, bits)


def unpack(packed: Tensor, width: int, bits: int) -> Tensor:
    """The codes `[..., width]` uint8 of which `pack` made `packed [..., packed_width(width, bits)]`.

    Raises:
        ValueError: bits other than 8, 4, 3 and 2.
    """
    if bits == 8:
        return packed
    codes = packed.new_empty((*packed.shape[:-1], padded_width(width, bits)))
    unpack_into(packed, codes, bits)
    return codes[..., :width]


def unpack_into(packed: Tensor, codes: Tensor, bits: int) -> None:
    """Write what `unpack` gives into `codes [..., padded_width(width, bits)]`, of any dtype; bits 4, 3 or 2.

    Slices of one output take a third of what `torch.cat` takes on a CPU, and convert on the way.
    """
    if bits == 3:
        packed, bits = nibbles(packed, codes.shape[-1]), 4
    elif bits == 2:  # the same: runs of half the width are twice as fast to write as four of a quarter
        packed, bits = torch.cat([packed & 0x33, (packed >> 2).bitwise_and_(0x33)], dim=-1), 4
    parts = codes.chunk(8 // bits, dim=-1)
    for number, part in enumerate(parts):
        run = packed >> number * bits if number else packed
        run = run if number == len(parts) - 1 else run & 2**bits - 1
        part.copy_(run.view(torch.int8))  # half the time of uint8


def nibbles(packed: Tensor, padded: int) -> Tensor:
    """The 4-bit layout, `[..., padded / 2]` uint8, of `padded` (a multiple of 8) 3-bit codes."""
    low, high = packed.split([padded // 4, padded // 8], dim=-1)
    high = torch.cat([high, high >> 1], dim=-1)  # bits 0, 2, 4 and 6 now belong to the quarters of the codes in turn
    evens = (low & 0x33).bitwise_or_((high << 2).bitwise_and_(0x44))
    odds = (low >> 2).bitwise_and_(0x33).bitwise_or_(high & 0x44)
    return torch.cat([evens, odds], dim=-1)


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0].clone(memory_format=torch.contiguous_format)
    for number, part in enumerate(parts[1:], 1):
        packed |= part << number * bits
    return packed
