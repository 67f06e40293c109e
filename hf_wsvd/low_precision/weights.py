"""Symmetric integer weights with a scale for each row, or for each group of a row's input channels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.packing import pack, unpack


# The largest code. The range is symmetric: -128 and -8 do not occur, so that a negated weight has negated codes.
LIMITS = {8: 127, 4: 7}
# What 4 bits store is the code plus this, for packed codes are unsigned.
OFFSET = 8
# Groups of 4-bit weights by default, the first that divides the inputs.
GROUP_SIZES = (128, 64, 32)
SMALLEST = torch.finfo(torch.float32).tiny


def check_bits(bits: int) -> None:
    """Raise ValueError for bits other than 8 and 4."""
    if bits not in LIMITS:
        raise ValueError(f"bits={bits!r} is not allowed; allowed: one of {tuple(LIMITS)}")


def group_size_of(in_features: int, bits: int, group_size: int | None) -> int:
    """Input channels that share a scale, see `LowPrecisionConfig.group_size`.

    Raises:
        ValueError: a size that does not divide `in_features`.
    """
    check_bits(bits)
    if group_size is None:
        fitting = [size for size in GROUP_SIZES if in_features % size == 0] if bits == 4 else []
        return fitting[0] if fitting else in_features
    if group_size < 1 or in_features % group_size:
        raise ValueError(f"group_size={group_size} is not allowed; allowed: a divisor of {in_features} input channels")
    return group_size


def weight_scales(weight: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """`[out, groups]` fp32 of `weight [out, in]`: the largest absolute value of each group, over 127 or 7."""
    groups = weight.detach().float().unflatten(1, (-1, group_size_of(weight.shape[1], bits, group_size)))
    return groups.abs().amax(-1) / LIMITS[bits]


def quantize_weight(
    weight: Tensor, bits: int, group_size: int | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round a weight to the nearest integers, as they are stored.

    Args:
        weight: `[out, in]`, any float dtype.
        bits: 8 or 4.
        group_size: as of `LowPrecisionConfig`; of given scales, their number says it.
        scales: `[out, groups]`, at least 0; codes beyond the range are cut. None: `weight_scales`.

    Returns:
        Codes, int8 `[out, in]` or, at 4 bits, uint8 `[out, ceil(in / 2)]`, packed as `kernels.packing` does it; and
        the scales in fp32.

    Raises:
        ValueError: other bits, or a group size that does not divide the inputs.
    """
    check_bits(bits)
    scales = (weight_scales(weight, bits, group_size) if scales is None else scales).detach().float()
    codes = rounded(weight.detach(), scales, bits).to(torch.int8)
    return (codes if bits == 8 else pack((codes + OFFSET).view(torch.uint8), bits)), scales


def weight_codes(stored: Tensor, bits: int, in_features: int) -> Tensor:
    """The codes `[out, in]` int8 of what `quantize_weight` stored."""
    return stored if bits == 8 else unpack(stored, in_features, bits).view(torch.int8) - OFFSET


def dequantize_weight(
    stored: Tensor, scales: Tensor, bits: int, in_features: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight `[out, in]` that `quantize_weight` stored; multiplied in fp32, then cast to `dtype`."""
    return scaled(weight_codes(stored, bits, in_features).float(), scales).to(dtype)


def fake_quantized_weight(
    weight: Tensor, bits: int, group_size: int | None = None, scales: Tensor | None = None
) -> Tensor:
    """`weight [out, in]` as it is after `quantize_weight` and `dequantize_weight`, in its own dtype, to the last bit.

    Gradients pass the rounding unchanged, but not where a code was cut. Given scales get those of LSQ (Esser et al.
    2020, equation 3); largest values as scales count as constants.
    """
    check_bits(bits)
    if scales is None:
        scales = weight_scales(weight, bits, group_size)
    return _FakeQuantizedWeight.apply(weight, scales, bits)


def rounded(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes `[out, in]` in fp32; of a scale of 0 (a group of zeros) they are 0."""
    return divided(weight, scales).round_().clamp_(-LIMITS[bits], LIMITS[bits])


def divided(weight: Tensor, scales: Tensor) -> Tensor:
    """`weight [out, in]` over `scales [out, groups]`, in fp32."""
    groups = weight.float().unflatten(1, (scales.shape[1], -1))
    return (groups / scales.float().clamp_min(SMALLEST).unsqueeze(-1)).flatten(1)


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """`codes [out, in]` fp32 times `scales [out, groups]`."""
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales.float().unsqueeze(-1)).flatten(1)


class _FakeQuantizedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, scales: Tensor, bits: int) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.bits = bits
        return scaled(rounded(weight, scales, bits), scales).to(weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, scales = ctx.saved_tensors
        of_weight = of_scales = None
        exact = divided(weight, scales)
        inside = exact.abs() <= LIMITS[ctx.bits] + 0.5
        if ctx.needs_input_grad[0]:
            of_weight = grad * inside
        if ctx.needs_input_grad[1]:
            codes = rounded(weight, scales, ctx.bits)
            by_element = grad.float() * torch.where(inside, codes - exact, codes)
            of_scales = by_element.unflatten(1, (scales.shape[1], -1)).sum(-1).to(scales.dtype)
        return of_weight, of_scales, None
