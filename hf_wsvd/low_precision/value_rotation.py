"""The channels of every value head turned; the rotation lies in `v_proj` and `o_proj` and costs nothing.

Attention adds up values with one weight a token, so that a rotation of a head's channels passes through it (QuaRot,
arXiv 2404.00456, section 4.1). Query heads that share a KV head share its rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..modules import LatentProjection
from ..rotations import spreading_rotation
from .residual_layers import ResidualLayer
from .residual_rotation import turn_inputs, turn_outputs


def rotate_value_weights(layer: ResidualLayer, head_dim: int) -> None:
    """Turn the outputs of `v_proj` and the inputs of `o_proj`, head by head."""
    rotation = spreading_rotation(head_dim)
    turn_head_outputs(layer.attention.v_proj, rotation)
    turn_inputs(layer.attention.o_proj, rotation)


@torch.no_grad()
def turn_head_outputs(projection: nn.Module, rotation: Tensor) -> None:
    """Let every head of a dense or low-rank projection give `y R` for `y`; R is `[head_dim, head_dim]`."""
    if not isinstance(projection, LatentProjection):
        turn_outputs(projection, rotation)
        return
    rotation = rotation.to(projection.weight.device)
    rows = len(projection.full_heads) * projection.head_dim if projection.up is not None else len(projection.weight)
    if rows:
        full = projection.weight[:rows].double().unflatten(0, (-1, projection.head_dim))
        projection.weight[:rows] = (rotation.T @ full).flatten(0, 1).to(projection.weight.dtype)
    if projection.up is not None:
        projection.up.copy_(rotation.T @ projection.up.double())
    if projection.bias is not None:
        projection.bias.copy_((projection.bias.double().unflatten(0, (-1, projection.head_dim)) @ rotation).flatten())
