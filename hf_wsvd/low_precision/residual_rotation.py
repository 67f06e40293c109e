"""S1: the residual stream turned by an orthogonal matrix that lies in the neighbouring weights.

`x -> x R` with R = `spreading_rotation(hidden_size, seed)` spreads outlier channels over all (QuaRot, arXiv
2404.00456, section 4.1; WSVD, arXiv 2604.02570, section 3.3). RMS norms commute with R once their weights lie in the
linear layers that read them. Embeddings, output head and projectors stay as they are, tied or scaled or not: hidden
states are turned before the first layer and turned back before the last norm. Between layers they stand turned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..decoder import decoder_of
from ..rotations import spreading_rotation
from .residual_layers import ResidualLayer, neutralise, norm_gain, residual_layers, scale_inputs
from .spreading import Spreading


NAME = "residual_rotation"  # of the submodule of the first layer, and of the last norm


def rotate_residual_weights(layer: ResidualLayer, seed: int, *, back: bool = False) -> None:
    """Let a layer compute on hidden states turned by R, its norms' weights in the linear layers; or `back`."""
    if not back:
        for norm, readers in layer.norms():
            gain = norm_gain(norm)
            for linear in readers:
                scale_inputs(linear, gain)
            neutralise(norm)
    size = layer.readers()[0].in_features
    rotation = spreading_rotation(size, seed)
    rotation = rotation.T if back else rotation
    for linear in layer.readers():
        turn_inputs(linear, rotation)
    for linear in layer.writers():
        turn_outputs(linear, rotation)


@torch.no_grad()
def turn_inputs(linear: nn.Module, rotation: Tensor) -> None:
    """Let a linear layer take `x R` for `x`, block by block where R is smaller than its inputs."""
    blocks = linear.weight.double().unflatten(1, (-1, len(rotation)))
    linear.weight.copy_((blocks @ rotation.to(blocks.device)).flatten(1))


@torch.no_grad()
def turn_outputs(linear: nn.Module, rotation: Tensor) -> None:
    """Let a linear layer give `y R` for `y`, block by block where R is smaller than its outputs."""
    rotation = rotation.to(linear.weight.device)
    blocks = linear.weight.double().unflatten(0, (-1, len(rotation)))
    linear.weight.copy_((rotation.T @ blocks).flatten(0, 1))
    if linear.bias is not None:
        linear.bias.copy_((linear.bias.double().unflatten(0, (-1, len(rotation))) @ rotation).flatten())


def install_residual_rotation(model: PreTrainedModel, seed: int) -> None:
    """Turn hidden states where they enter the layers, and back where they leave; nothing if this is done already.

    The layers' weights must be those of `rotate_residual_weights`, as a checkpoint holds them.
    """
    decoder = decoder_of(model)
    for module, back, hook in ((decoder.layers[0], False, _turn_hidden_states), (decoder.norm, True, _turn_input)):
        if hasattr(module, NAME):
            continue
        size = decoder.norm.weight.shape[0]
        device = next(module.parameters()).device
        rotation = Spreading(size, size, seed, back=back, device=device)
        rotation.hook = module.register_forward_pre_hook(hook, with_kwargs=True)
        module.add_module(NAME, rotation)


def remove_residual_rotation(model: PreTrainedModel, seed: int) -> None:
    """Turn the weights back, and hidden states no more. Norms' weights stay in the linear layers.

    Linear layers must hold plain weights.
    """
    for layer in residual_layers(model):
        rotate_residual_weights(layer, seed, back=True)
    decoder = decoder_of(model)
    for module in (decoder.layers[0], decoder.norm):
        getattr(module, NAME).hook.remove()
        delattr(module, NAME)


def _turn_hidden_states(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    rotation = getattr(layer, NAME)
    if args:
        return (rotation(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": rotation(kwargs["hidden_states"])}


def _turn_input(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return (getattr(norm, NAME)(args[0]), *args[1:]), kwargs
