"""Outliers of input channels moved into the weights (SmoothQuant, arXiv 2211.10438, equation 4).

Channel j of a linear layer's inputs is divided by `s_j = max|x_j|^a / max|w_j|^(1 - a)`, its weights are multiplied
by it. The division lies in what computes the inputs: a norm, `v_proj`, or `up_proj` of a gated MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..modules import LatentProjection
from .residual_layers import ResidualLayer, scale_inputs, scale_norm, scale_outputs


Ranges = dict[str, Tensor]


def channel_factors(ranges: Tensor, linears: list[nn.Module], smoothing: float) -> Tensor:
    """`s [in]` fp64 for inputs of largest absolute values `ranges [in]`; 1 where inputs or weights are all zero."""
    weights = torch.stack([linear.weight.detach().abs().amax(0).double() for linear in linears]).amax(0)
    ranges = ranges.to(weights)
    factors = ranges.pow(smoothing) / weights.pow(1 - smoothing)
    usable = (ranges > 0) & (weights > 0) & factors.isfinite()
    return torch.where(usable, factors, 1.0)


def smooth_norms(layer: ResidualLayer, ranges: Ranges, smoothing: float) -> None:
    """Smooth what reads the layer's norms. `ranges` as `input_ranges` gives them."""
    by_module = {module: ranges[name] for group in layer.groups() for name, module in group.items()}
    for norm, readers in layer.norms():
        factors = channel_factors(by_module[readers[0]], readers, smoothing)
        scale_norm(norm, 1 / factors)
        for linear in readers:
            scale_inputs(linear, factors)


def smooth_values(layer: ResidualLayer, ranges: Ranges, smoothing: float, head_dim: int) -> None:
    """Smooth the inputs of `o_proj`; query heads that share a KV head share its factors."""
    value, output = layer.attention.v_proj, layer.attention.o_proj
    shape = (value.out_features // head_dim, -1, head_dim)
    found = channel_factors(ranges[f"{layer.name}.self_attn.o_proj"], [output], smoothing)
    factors = found.view(shape).amax(1)
    scale_head_outputs(value, 1 / factors)
    scale_inputs(output, factors[:, None].expand(-1, found.numel() // factors.numel(), -1).flatten())


def smooth_mlp(layer: ResidualLayer, ranges: Ranges, smoothing: float) -> None:
    """Smooth the inputs of the MLP's last layer, through the projection that its gate is multiplied with."""
    factors = channel_factors(ranges[f"{layer.name}.mlp.down_proj"], [layer.mlp.down_proj], smoothing)
    scale_outputs(layer.mlp.up_proj, 1 / factors)
    scale_inputs(layer.mlp.down_proj, factors)


@torch.no_grad()
def scale_head_outputs(projection: nn.Module, gain: Tensor) -> None:
    """Multiply the outputs of a dense or low-rank projection by `gain [heads, head_dim]`."""
    if not isinstance(projection, LatentProjection):
        scale_outputs(projection, gain.flatten())
        return
    gain = gain.to(projection.weight.device, torch.float64)
    full = list(projection.full_heads) if projection.up is not None else list(range(projection.heads))
    rows = len(full) * projection.head_dim
    if rows:
        projection.weight[:rows] = (projection.weight[:rows].double() * gain[full].view(-1, 1)).to(
            projection.weight.dtype
        )
    if projection.up is not None:
        projection.up.copy_(projection.up.double() * gain[projection.cut_heads].unsqueeze(-1))
    if projection.bias is not None:
        projection.bias.copy_(projection.bias.double() * gain.flatten())
