"""Symmetric integer activations with one scale a token, found when they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from .weights import LIMITS, SMALLEST, check_bits


def quantize_activations(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round each token to the nearest integers of its own range.

    A token that is not finite has a scale that is not finite, so that it shows in whatever its codes are used for.

    Args:
        x: `[..., features]`, any float dtype.
        bits: 8 or 4; codes of 4 bits fill a byte each, for they are not stored.

    Returns:
        Codes int8 `[..., features]` from -127 to 127, or -7 to 7, and scales fp32 `[..., 1]`: the token's largest
        absolute value over 127, or 7.

    Raises:
        ValueError: other bits.
    """
    check_bits(bits)
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / LIMITS[bits]
    return (x / scales.clamp_min(SMALLEST)).round().to(torch.int8), scales


def fake_quantized_activations(x: Tensor, bits: int) -> Tensor:
    """`x [..., features]` as it is after rounding, in its own dtype; gradients pass unchanged.

    The numbers are those of `quantize_activations`, multiplied in fp32. 16 bits leave `x` as it is.
    """
    return x if bits == 16 else _FakeQuantizedActivations.apply(x, bits)


class _FakeQuantizedActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bits: int) -> Tensor:
        codes, scales = quantize_activations(x, bits)
        return (codes.float() * scales).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
