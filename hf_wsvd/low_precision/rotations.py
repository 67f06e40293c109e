"""What of a checkpoint's rotations is computed when the model runs: set up at a load, taken out by `dequantize`."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..quantizer_config import LowPrecisionConfig
from .mlp_rotation import install_mlp_rotation, remove_mlp_rotation
from .residual_layers import UnknownStructure, check_plain_residual
from .residual_rotation import install_residual_rotation, remove_residual_rotation


def install_rotations(model: PreTrainedModel, config: LowPrecisionConfig) -> None:
    """Let a model with turned weights turn its activations; what is set up already stays.

    To be called when weights are in memory, and again when linear layers were exchanged.

    Raises:
        ValueError: rotations that a checkpoint's configuration names and that the model cannot have.
    """
    try:
        if config.residual_rotation is not None:
            check_plain_residual(model)
            install_residual_rotation(model, config.residual_rotation)
        if config.mlp_rotation is not None:
            install_mlp_rotation(model, config.mlp_rotation)
    except UnknownStructure as error:
        raise ValueError(f"LowPrecisionConfig: residual_rotation={config.residual_rotation}: {error}") from error


def remove_rotations(model: PreTrainedModel, config: LowPrecisionConfig) -> None:
    """Turn the weights back offline, and activations no more: the model is then a plain one of the same function.

    Linear layers must be plain or low-rank ones, not quantized. Weights of norms stay where the rotation put them, in
    the linear layers that read the norms.
    """
    if config.mlp_rotation is not None:
        remove_mlp_rotation(model, config.mlp_rotation)
    if config.residual_rotation is not None:
        remove_residual_rotation(model, config.residual_rotation)
