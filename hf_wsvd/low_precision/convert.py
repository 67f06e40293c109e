"""The exchange of a decoder's linear layers for quantized ones, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..calibration import Statistics, is_statistics
from ..calibration.batches import Batch
from ..modules import LatentProjection
from ..quantizer_config import WSVDConfig
from .chosen import chosen_linears
from .latent import QuantizedLatentProjection
from .linear import QuantizedLinear, QuantizedWeight
from .mlp_rotation import install_mlp_rotation, remove_mlp_rotation
from .prepare import prepare
from .residual_layers import check_plain_residual, residual_layers
from .residual_rotation import install_residual_rotation, remove_residual_rotation


def check_low_precision(model: PreTrainedModel, config: WSVDConfig, calibration: Any) -> None:
    """Raise ValueError for what `config.low_precision` cannot do with `model` and the data, before any work.

    Needs no weights: the model may be on the meta device.

    Args:
        calibration: data, or statistics or their file, or None for the default set.
    """
    settings = config.low_precision
    if settings is None:
        return
    chosen_linears(model, config)
    if settings.needs_data and is_statistics(calibration):
        raise ValueError(
            f"low_precision with method={settings.method!r} measures the model on calibration data, and statistics "
            "hold no inputs: give data as calibration=, or choose method='rtn'"
        )


def check_weights(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Raise ValueError for a weight with NaN or infinity, which has no scale."""
    for name, module in chosen_linears(model, config).items():
        if not module.weight.is_meta and not torch.isfinite(module.weight).all():
            raise ValueError(f"{name} has weights that are not finite (NaN or infinity) and cannot be quantized")


def quantize_modules(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Put quantized layers in the place of the linear layers that `config.low_precision` chooses.

    Weights are rounded to the nearest codes, one layer after the other, so that little more than one dense weight is
    held twice. A layer may carry scales that were learned for it as an attribute `learned_scales [out, groups]`. On
    the meta device the layers get their form and no values, as a checkpoint that is to be loaded needs them.

    Raises:
        ValueError: as `chosen_linears` and `check_weights`, before any layer is exchanged.
    """
    check_weights(model, config)
    chosen = chosen_linears(model, config)
    for name in list(chosen):
        module = chosen.pop(name)  # the dense weight shall have no owner left
        replace_module(model, name, quantized(module, config))


def lower_precision(
    model: PreTrainedModel,
    config: WSVDConfig,
    batches: Iterable[Batch] | None,
    statistics: Statistics | None = None,
) -> dict[str, Any]:
    """Bring a fitted model to the precision that `config.low_precision` asks for: prepare its weights, round them.

    An interruption leaves a model that is good for nothing: what it was is not kept, for the sake of memory. What is
    wrong with weights or data raises before anything is changed.

    Args:
        model: in its float dtype, latent projections in place.
        batches: calibration data; None for methods that look at none.
        statistics: what the fit was made from, where anything was fitted.

    Returns:
        The JSON record of what the method did.

    Raises:
        ValueError: as `quantize_modules`, and for data that the model does not take.
    """
    refuse_offload(model, config)
    check_weights(model, config)
    # Rotations of an earlier fit, in a config that is used again, are none of these weights'.
    config.low_precision.residual_rotation = config.low_precision.mlp_rotation = None
    record = prepare(model, config, batches, statistics)
    quantize_modules(model, config)
    install_rotations(model, config)
    return record


def refuse_offload(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Raise ValueError if a weight that is to be rounded is not at hand."""
    offloaded = [name for name, module in chosen_linears(model, config).items() if module.weight.is_meta]
    if offloaded:
        raise ValueError(
            f"{offloaded[0]} is offloaded and cannot be quantized: load the model with a device_map that fits"
        )


def quantized(module: nn.Linear | LatentProjection, config: WSVDConfig) -> QuantizedLinear | QuantizedLatentProjection:
    """The quantized form of one layer."""
    scales = getattr(module, "learned_scales", None)
    if isinstance(module, LatentProjection):
        return QuantizedLatentProjection(module, config.low_precision, scales)
    return QuantizedLinear.from_linear(module, config.low_precision, scales)


def quantized_modules(model: nn.Module) -> dict[str, QuantizedWeight]:
    """By name the quantized layers that stand in a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def check_rotations(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Raise ValueError if a checkpoint was made with rotations that the layers of `model` cannot have."""
    settings = config.low_precision
    if settings.residual_rotation is not None or settings.mlp_rotation is not None:
        layers = residual_layers(model)
        if settings.residual_rotation is not None:
            check_plain_residual(model)
        widths = {layer.mlp.down_proj.in_features for layer in layers if layer.mlp is not None}
        if settings.mlp_rotation is not None and any(width % settings.mlp_rotation for width in widths):
            raise ValueError(
                f"LowPrecisionConfig: mlp_rotation={settings.mlp_rotation} does not divide the MLP's {widths} channels"
            )


def install_rotations(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Turn activations where the weights of `config.low_precision` expect it; nothing where they are turned."""
    settings = config.low_precision
    if settings.residual_rotation is not None:
        install_residual_rotation(model, settings.residual_rotation)
    if settings.mlp_rotation is not None:
        install_mlp_rotation(model, settings.mlp_rotation)


def remove_rotations(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Turn the weights of a dequantized model back, and activations no more."""
    settings = config.low_precision
    if settings.mlp_rotation is not None:
        remove_mlp_rotation(model, settings.mlp_rotation)
    if settings.residual_rotation is not None:
        remove_residual_rotation(model, settings.residual_rotation)


def check_scales(model: PreTrainedModel) -> None:
    """Raise ValueError if a loaded checkpoint has weight scales that no weight has: NaN, infinite or negative.

    Scales that are offloaded are not looked at.
    """
    for name, module in quantized_modules(model).items():
        scales = module.weight_scales
        if not scales.is_meta and not (torch.isfinite(scales) & (scales >= 0)).all():
            raise ValueError(f"corrupted checkpoint: {name}.weight_scales has values that are negative or not finite")


def dequantize_modules(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put ordinary layers with the dequantized weights in the place of quantized ones."""
    for name, module in quantized_modules(model).items():
        replace_module(model, name, module.merged(dtype))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Let `new` stand where `name` points."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
