"""Linear layers whose weight is stored as integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..quantizer_config import LowPrecisionConfig
from .product import quantized_product
from .weights import dequantize_weight, group_size_of, quantize_weight


class QuantizedWeight(nn.Module):
    """The quantized `weight [rows, in_features]` of a layer; a base of the layers that have one.

    It stands in the checkpoint under the dense weight's name with another shape, so that loading without hf_wsvd fails
    instead of taking codes for weights.

    Attributes:
        weight: codes, int8 `[rows, groups, group_size]` or, at 4 bits, uint8 `[rows, ceil(in / 2)]`, two in a byte.
        weight_scales: `[rows, groups]`. In fp32 whatever the dtype of the model: a cast of the model leaves them.
    """

    def allocate(
        self, rows: int, in_features: int, config: LowPrecisionConfig, device: torch.device | str | None
    ) -> None:
        """Give the layer parameters without values. ValueError for a group size that does not divide the inputs."""
        self.weight_bits, self.activation_bits = config.weight_bits, config.activation_bits
        self.group_size = group_size_of(in_features, config.weight_bits, config.group_size)
        groups = in_features // self.group_size
        if self.weight_bits == 8:
            codes = torch.empty(rows, groups, self.group_size, device=device, dtype=torch.int8)
        else:
            codes = torch.empty(rows, -(-in_features // 2), device=device, dtype=torch.uint8)
        scales = torch.empty(rows, groups, device=device, dtype=torch.float32)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)

    def set_weight(self, weight: Tensor, scales: Tensor | None = None) -> None:
        """Store a float weight `[rows, in]`, rounded to the nearest codes; with given scales `[rows, groups]`."""
        codes, scales = quantize_weight(weight, self.weight_bits, self.group_size, scales)
        if scales.shape != self.weight_scales.shape:
            raise ValueError(f"scales of shape {list(scales.shape)} do not fit {list(self.weight_scales.shape)}")
        self.weight = nn.Parameter(codes.view(self.weight.shape), requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)

    @property
    def codes(self) -> Tensor:
        """`weight` as `quantize_weight` gives it, `[rows, ...]`."""
        return self.weight.flatten(1)

    def product(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., rows]`, without bias."""
        return quantized_product(x, self.codes, self.weight_scales, self.weight_bits, self.activation_bits)

    def dequantized_weight(self) -> Tensor:
        """`[rows, in]` fp32."""
        return dequantize_weight(self.codes, self.weight_scales, self.weight_bits, self.in_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = self.weight.data, self.weight_scales.data
        super()._apply(fn, recurse)
        for parameter, values in zip((self.weight, self.weight_scales), held):
            if parameter.dtype != values.dtype:  # a cast, perhaps together with a move
                parameter.data = values.to(parameter.device)
        return self

    def format_repr(self) -> str:
        """Bits and group size for people."""
        return f"weight_bits={self.weight_bits}, activation_bits={self.activation_bits}, group_size={self.group_size}"


class QuantizedLinear(QuantizedWeight):
    """`y = Q(x) W^T + b` with an integer weight, and activations rounded to integers by token below 16 bits.

    Args:
        config: bits and group size.
        dtype: of the bias.

    Raises:
        ValueError: a group size that does not divide `in_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        config: LowPrecisionConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.allocate(out_features, in_features, config, device)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, config: LowPrecisionConfig, scales: Tensor | None = None
    ) -> QuantizedLinear:
        """The quantized form of `linear`, whose bias it shares; on the meta device without values.

        Args:
            scales: `[out, groups]` in place of the largest absolute values.
        """
        new = cls(linear.in_features, linear.out_features, False, config, device="meta")
        if not linear.weight.is_meta:
            new.set_weight(linear.weight.detach(), scales)
        new.bias = linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]` in the dtype of `x`."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def merged(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """The ordinary layer with the dequantized weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantized_weight().to(dtype))
        linear.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            + self.format_repr()
        )
