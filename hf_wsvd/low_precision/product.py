"""The product of activations with quantized weights, in integers where both sides are integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import quantize_activations
from .weights import dequantize_weight, weight_codes


# What torch's integer product on CUDA takes: more rows than this, other sizes in multiples of 8.
CUDA_LEAST_ROWS = 17
CUDA_MULTIPLE = 8
# Integer tensor cores by way of cuBLASLt.
CUDA_CAPABILITY = (7, 5)


def quantized_product(x: Tensor, stored: Tensor, scales: Tensor, weight_bits: int, activation_bits: int) -> Tensor:
    """`Q(x) W^T` with the stored weight `W` and `Q(x)` the activations rounded by token; at 16 bits they are not.

    Weights are constants: gradients reach `x` alone, as if it had not been rounded.

    Args:
        x: `[..., in]`, float.
        stored, scales: as `quantize_weight` gives them, `[out, ...]` and `[out, groups]`.

    Returns:
        `[..., out]` in the dtype of `x`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Product.apply(x, stored, scales, weight_bits, activation_bits)
    return _product(x, stored, scales, weight_bits, activation_bits)


def integer_obstacle(device: torch.device, in_features: int, out_features: int, groups: int) -> str | None:
    """Why 8- and 4-bit activations are not multiplied in integers, in words; None where they are.

    What stands in for the integer product multiplies the same numbers in the dtype of the activations.
    """
    if groups > 1:
        return "groups of input channels have scales of their own"
    if device.type == "cuda":
        if in_features % CUDA_MULTIPLE or out_features % CUDA_MULTIPLE:
            return f"{in_features} inputs and {out_features} outputs are not both multiples of {CUDA_MULTIPLE}"
        return cuda_obstacle(device)
    return None if device.type in ("cpu", "meta") else f"torch has no integer product on {device.type}"


@torch.compiler.assume_constant_result
def cuda_obstacle(device: torch.device) -> str | None:
    """Why a CUDA device has no integer product; None where it has one."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    found = torch.cuda.get_device_capability(device)
    return None if found >= CUDA_CAPABILITY else f"compute capability {found} is below {CUDA_CAPABILITY}"


def _product(x: Tensor, stored: Tensor, scales: Tensor, weight_bits: int, activation_bits: int) -> Tensor:
    in_features = x.shape[-1]
    if activation_bits == 16:
        return F.linear(x, dequantize_weight(stored, scales, weight_bits, in_features, x.dtype))
    codes, token_scales = quantize_activations(x, activation_bits)
    if integer_obstacle(x.device, in_features, len(stored), scales.shape[1]) is None:
        product = integer_product(codes.reshape(-1, in_features), weight_codes(stored, weight_bits, in_features))
        product = product.reshape(*x.shape[:-1], len(stored)).float() * scales[:, 0]
    else:
        # Codes over a power of two are exact in every dtype, and sums of them stay in the range of float16.
        weight = dequantize_weight(stored, scales, weight_bits, in_features, x.dtype)
        product = F.linear(codes.to(x.dtype) / 128, weight).float() * 128
    return (product * token_scales).to(x.dtype)


def integer_product(left: Tensor, right: Tensor) -> Tensor:
    """`left [M, K] @ right [N, K]^T`, both int8, exact in int32 `[M, N]`."""
    rows = left.shape[0]
    if left.device.type == "cuda" and rows < CUDA_LEAST_ROWS:
        left = F.pad(left, (0, 0, 0, CUDA_LEAST_ROWS + 15 - rows))
    return torch._int_mm(left, right.t())[:rows]


class _Product(torch.autograd.Function):
    """Keeps the codes for the backward pass, not the weight that they stand for, which is four times as large."""

    @staticmethod
    def forward(ctx, x: Tensor, stored: Tensor, scales: Tensor, weight_bits: int, activation_bits: int) -> Tensor:
        ctx.save_for_backward(stored, scales)
        ctx.weight_bits, ctx.in_features = weight_bits, x.shape[-1]
        return _product(x, stored, scales, weight_bits, activation_bits)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        stored, scales = ctx.saved_tensors
        weight = dequantize_weight(stored, scales, ctx.weight_bits, ctx.in_features, grad.dtype)
        return grad @ weight, None, None, None, None
