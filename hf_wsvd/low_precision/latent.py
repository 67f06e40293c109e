"""The low-rank projection whose down factor is stored as integers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..modules import LatentProjection
from ..quantizer_config import LowPrecisionConfig
from .linear import QuantizedWeight


class QuantizedLatentProjection(QuantizedWeight, LatentProjection):
    """A `LatentProjection` with an integer down factor.

    The up factor stays in the model's dtype: kernels read it there in every step, and it is a small part of the
    weights.

    Args:
        projection: whose form it takes, and whose values, unless it is on the meta device. Up factor and bias are
            shared.
        scales: `[rows of the down factor, groups]` in place of the largest absolute values.

    Raises:
        ValueError: a group size that does not divide the inputs.
    """

    def __init__(self, projection: LatentProjection, config: LowPrecisionConfig, scales: Tensor | None = None):
        form = (projection.in_features, projection.heads, projection.head_dim, projection.rank)
        super().__init__(*form, full_heads=projection.full_heads, device="meta")
        self.allocate(len(projection.weight), projection.in_features, config, "meta")
        if not projection.weight.is_meta:
            self.set_weight(projection.weight.detach(), scales)
        self.up, self.bias = projection.up, projection.bias
        self.train(projection.training)

    def down(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to the stacked latents of all heads."""
        return self.product(x)

    def dequantized(self) -> LatentProjection:
        """The same with a down factor in fp32."""
        form = (self.in_features, self.heads, self.head_dim, self.rank)
        plain = LatentProjection(*form, full_heads=self.full_heads, device="meta")
        plain.weight = nn.Parameter(self.dequantized_weight())
        plain.up, plain.bias = self.up, self.bias
        return plain.train(self.training)

    def merged(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """The dense layer with weight `U_h D_h`, multiplied in fp32."""
        linear = self.dequantized().merged()
        linear.weight = nn.Parameter(linear.weight.detach().to(dtype))
        linear.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format_repr()}"
