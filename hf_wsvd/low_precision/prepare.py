"""What happens to a model's weights before they are rounded, by method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration import Statistics, is_statistics
from ..calibration.batches import Batch
from ..decoder import decoder_attentions, evaluation_mode
from ..modules import LatentProjection
from ..quantizer_config import WSVDConfig
from ..rotations import spreading_rotation
from .absorption import check_absorption
from .chosen import chosen_linears
from .fine_tuning import fine_tune, inputs_and_outputs
from .mlp_rotation import block_size, install, install_mlp_rotation, rotate_mlp_weights
from .replay import RecordedBatch, recorded
from .residual_layers import ResidualLayer, UnknownStructure, check_plain_residual, residual_layers
from .residual_rotation import install_residual_rotation, rotate_residual_weights
from .smoothing import Ranges, smooth_mlp, smooth_norms, smooth_values
from .value_rotation import rotate_value_weights


MOST_TOKENS = 2**15  # of calibration data; of one layer, the inputs of this many tokens are in memory


@torch.no_grad()
def prepare(
    model: PreTrainedModel,
    config: WSVDConfig,
    batches: Iterable[Batch] | None,
    statistics: Statistics | None = None,
) -> dict[str, Any]:
    """Change float weights in place so that rounding them, and their inputs, loses little.

    Before it is applied, every rotation and scaling is proved on copies of the layers to leave what they compute as it
    is; one that a model's structure forbids is left out and named in the record, and inputs of linear layers that no
    rotation reaches are smoothed by channel.

    Args:
        model: fitted, its weights still float; on success it computes what it did, up to rounding.
        config: `low_precision` says the method; its `residual_rotation` and `mlp_rotation` are written.
        batches: calibration data, of which the first 32,768 tokens are used.
        statistics: what the fit was made from, for the gradients that weigh the errors of latents; None: unweighted.

    Returns:
        JSON record: `method`, `transforms` (by part of the layers what was done), `refused` (what was not, and why)
        and, of "wsvd_qat", `lost`: by layer name the shares of output energy that rounding to nearest loses and that
        the fine-tuned weights lose.

    Raises:
        ValueError: no data, statistics in place of them, weights or activations that are not finite, a decoder
            without a list of layers, or a call inside `torch.inference_mode()`.
    """
    settings = config.low_precision
    record: dict[str, Any] = {"method": settings.method}
    if settings.method == "rtn":
        return record
    if batches is None or is_statistics(batches):
        raise ValueError(
            f"low_precision with method={settings.method!r} needs calibration data, and "
            f"{'none are given' if batches is None else 'statistics hold none'}: give batches, or method='rtn'"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(f"low_precision with method={settings.method!r} cannot run inside torch.inference_mode()")
    chosen = chosen_linears(model, config)
    try:
        layers = residual_layers(model)
    except UnknownStructure as error:
        raise ValueError(f"low_precision with method={settings.method!r}: {error}; method='rtn' needs none") from error
    _check_finite(chosen)
    with evaluation_mode(model):
        return record | _prepared(model, config, layers, chosen, batches, statistics)


def _prepared(
    model: PreTrainedModel,
    config: WSVDConfig,
    layers: list[ResidualLayer],
    chosen: dict[str, nn.Module],
    batches: Iterable[Batch],
    statistics: Statistics | None,
) -> dict[str, Any]:
    settings = config.low_precision
    calibration = recorded(model, [layer.module for layer in layers], batches, MOST_TOKENS)
    transforms = _Transforms(model, layers, calibration, config)
    if settings.method == "smoothquant":
        transforms.smooth(("norms", "values", "mlp"))
    # Weights alone gain nothing from turned inputs, which cost a product a layer.
    elif settings.method == "quarot" or settings.activation_bits < 16:
        transforms.rotate()
    record: dict[str, Any] = {"transforms": transforms.done, "refused": transforms.refused}
    if settings.method == "wsvd_qat":
        fisher = _fisher(statistics, model, transforms.done.get("values") == "rotation")
        record["lost"] = fine_tune(layers, calibration, chosen, settings, fisher=fisher)
    return record


class _Transforms:
    """Rotations and scalings of all layers, each tried on copies first."""

    def __init__(
        self, model: PreTrainedModel, layers: list[ResidualLayer], batches: list[RecordedBatch], config: WSVDConfig
    ):
        self.model, self.layers, self.batches, self.config = model, layers, batches, config
        self.done: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def rotate(self) -> None:
        """The residual stream, value heads and the MLP's products; smoothing where that cannot be."""
        settings, seed = self.config.low_precision, self.config.seed
        if self._tried("norms", "rotation", self._rotate_residual):
            settings.residual_rotation = seed
        if self._tried("mlp", "rotation", self._rotate_mlp):
            settings.mlp_rotation = self._block()
        self._tried("values", "rotation", self._rotate_values)
        self.smooth([part for part in ("norms", "values", "mlp") if part not in self.done])

    def smooth(self, parts: Iterable[str]) -> None:
        """Inputs of linear layers by channel: those of `norms`, of `values` (o_proj) and of the `mlp`'s last layer."""
        parts = list(parts)
        # One pass serves all parts: none changes the inputs that another one smooths.
        ranges = input_ranges(self.layers, self.batches) if parts else {}
        for part in parts:
            self._tried(part, "smoothing", lambda: self._smooth(part, ranges))  # noqa: B023

    def _tried(self, part: str, kind: str, transform: Any) -> bool:
        try:
            transform()
        except UnknownStructure as error:
            self.refused[f"{kind} of {part}"] = str(error)
            return False
        self.done[part] = kind
        return True

    def _rotate_residual(self) -> None:
        check_plain_residual(self.model)
        seed, size = self.config.seed, self.layers[0].readers()[0].in_features
        check_absorption(
            self.layers,
            self.batches[0],
            lambda layer: rotate_residual_weights(layer, seed),
            spreading_rotation(size, seed),
        )
        for layer in self.layers:
            rotate_residual_weights(layer, seed)
        install_residual_rotation(self.model, seed)

    def _block(self) -> int:
        widths = [layer.mlp.down_proj.in_features for layer in self.layers if layer.mlp is not None]
        return min(map(block_size, widths), default=1)

    def _rotate_mlp(self) -> None:
        layers = [layer for layer in self.layers if layer.mlp is not None]
        block = self._block()
        if block == 1:
            raise UnknownStructure("no MLP of gate_proj, up_proj and down_proj, or one of an odd width")

        def change(layer: ResidualLayer) -> None:
            if layer.mlp is not None:
                rotate_mlp_weights(layer, block)
                install(layer.mlp.down_proj, block)

        check_absorption(self.layers, self.batches[0], change)
        for layer in layers:
            rotate_mlp_weights(layer, block)
        install_mlp_rotation(self.model, block)

    def _rotate_values(self) -> None:
        self._absorbed(
            lambda layer: layer.attention is not None,
            lambda layer: rotate_value_weights(layer, self._head_dim(layer)),
        )

    def _smooth(self, part: str, ranges: Ranges) -> None:
        share = self.config.low_precision.smoothing
        if part == "norms":
            self._absorbed(lambda layer: bool(layer.readers()), lambda layer: smooth_norms(layer, ranges, share))
        elif part == "values":
            self._absorbed(
                lambda layer: layer.attention is not None,
                lambda layer: smooth_values(layer, ranges, share, self._head_dim(layer)),
            )
        else:
            self._absorbed(lambda layer: layer.mlp is not None, lambda layer: smooth_mlp(layer, ranges, share))

    def _absorbed(self, applies: Any, change: Any) -> None:
        """Apply `change` to the layers that `applies` names, proved first."""
        if not any(applies(layer) for layer in self.layers):
            raise UnknownStructure("no layer has these parts")
        check_absorption(self.layers, self.batches[0], lambda layer: change(layer) if applies(layer) else None)
        for layer in self.layers:
            if applies(layer):
                change(layer)

    def _head_dim(self, layer: ResidualLayer) -> int:
        head_dim = getattr(layer.attention, "head_dim", None)
        if not isinstance(head_dim, int) or layer.attention.o_proj.in_features % head_dim:
            raise UnknownStructure(f"{layer.name}.self_attn has no head_dim that divides the inputs of o_proj")
        return head_dim


def input_ranges(layers: list[ResidualLayer], batches: list[RecordedBatch]) -> Ranges:
    """By name of each linear layer the largest absolute value of every input channel, `[in]`."""
    ranges: Ranges = {}
    hidden = [batch.hidden for batch in batches]
    for number, layer in enumerate(layers):
        groups = layer.groups()
        seen, hidden = inputs_and_outputs(layer, number, batches, hidden, groups)
        for group, inputs in zip(groups, seen):
            largest = torch.stack([x.abs().amax(0).float() for x in inputs]).amax(0)
            ranges |= dict.fromkeys(group, largest)
    return ranges


def _check_finite(chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if not all(torch.isfinite(parameter).all() for parameter in module.parameters()):
            raise ValueError(f"{name} holds NaN or infinity and cannot be quantized")


def _fisher(statistics: Statistics | None, model: PreTrainedModel, values_turned: bool) -> dict[str, Tensor]:
    """By name of low-rank projections the second moment of the gradient at their heads."""
    found: dict[str, Tensor] = {}
    for attention in decoder_attentions(model) if statistics is not None else ():
        for side in "qkv":
            moment = statistics.gradient.get((attention.layer, side))
            projection = getattr(attention.module, f"{side}_proj", None)
            if moment is None or not isinstance(projection, LatentProjection):
                continue
            if side == "v" and values_turned:
                rotation = spreading_rotation(attention.head_dim)
                moment = rotation.T @ moment.double().cpu() @ rotation
            found[attention.side_name(side)] = moment
    return found
