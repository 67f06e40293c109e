"""The inputs of an MLP's last layer turned in blocks, when they are computed.

They are products of two projections, so that no rotation can be absorbed before them, and they hold the largest
outliers of a gated MLP: QuaRot (arXiv 2404.00456, section 4.2) turns them online. Blocks keep that cheap.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..rotations import spreading_rotation
from .residual_layers import ResidualLayer, residual_layers
from .residual_rotation import turn_inputs
from .spreading import Spreading


NAME = "input_rotation"  # of the submodule of the layer whose inputs are turned
LARGEST_BLOCK = 256


def block_size(width: int) -> int:
    """Channels that one rotation mixes: the largest power of two that divides `width`, at most 256."""
    return min(width & -width, LARGEST_BLOCK)


def rotate_mlp_weights(layer: ResidualLayer, block: int, *, back: bool = False) -> None:
    """Let the MLP's last layer take turned inputs, or plain ones again (`back`)."""
    rotation = spreading_rotation(block)
    turn_inputs(layer.mlp.down_proj, rotation.T if back else rotation)


def install_mlp_rotation(model: PreTrainedModel, block: int) -> None:
    """Turn the inputs of every gated MLP's last layer; nothing where this is done already.

    Weights must be those of `rotate_mlp_weights`, as a checkpoint holds them; the layer may be of any class.
    """
    for layer in residual_layers(model):
        if layer.mlp is not None:
            install(layer.mlp.down_proj, block)


def install(linear: nn.Module, block: int) -> None:
    """The same for one linear layer."""
    if hasattr(linear, NAME):
        return
    device = next(iter([*linear.parameters(), *linear.buffers()])).device
    rotation = Spreading(linear.in_features, block, device=device)
    rotation.hook = linear.register_forward_pre_hook(_turn_input)
    linear.add_module(NAME, rotation)


def remove_mlp_rotation(model: PreTrainedModel, block: int) -> None:
    """Turn the weights back, and the inputs no more. Linear layers must hold plain weights."""
    for layer in residual_layers(model):
        if layer.mlp is None:
            continue
        rotate_mlp_weights(layer, block, back=True)
        linear = layer.mlp.down_proj
        if hasattr(linear, NAME):
            getattr(linear, NAME).hook.remove()
            delattr(linear, NAME)


def _turn_input(linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (getattr(linear, NAME)(args[0]), *args[1:])
