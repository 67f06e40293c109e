"""Quantization-aware local fine-tuning of a whole decoder, one layer after the other; no end-to-end training.

Every linear layer is fitted to what the unrounded model computes there, on inputs that come out of layers which are
rounded already: later layers make good what earlier ones lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..modules import LatentProjection
from ..quantizer_config import LowPrecisionConfig
from .activations import fake_quantized_activations
from .latent_reconstruction import reconstruct_latents
from .moments import InputMoments, regularised, split
from .reconstruction import reconstruct
from .replay import RecordedBatch
from .residual_layers import ResidualLayer
from .weights import group_size_of


class _Seen(Exception):
    """Ends a layer's forward once its inputs are known."""


@torch.no_grad()
def fine_tune(
    layers: list[ResidualLayer],
    batches: list[RecordedBatch],
    chosen: dict[str, nn.Module],
    config: LowPrecisionConfig,
    *,
    fisher: dict[str, Tensor] | None = None,
) -> dict[str, dict[str, float]]:
    """Change the weights of `chosen` in place so that rounding to their new `learned_scales` changes nothing more.

    Args:
        batches: with the hidden states before the first layer.
        chosen: linear layers by name, as they will be rounded.
        fisher: by name, `[heads, head_dim, head_dim]` second moment of the gradient at a low-rank projection's heads.

    Returns:
        By name, the shares of the outputs' energy lost by rounding to nearest (`nearest`) and after this (`error`),
        both on the same rounded inputs.

    Raises:
        ValueError: naming the layer, for weights or inputs that are not finite.
    """
    report: dict[str, dict[str, float]] = {}
    exact, rounded = [batch.hidden for batch in batches], [batch.hidden for batch in batches]
    last = max((number for number, layer in enumerate(layers) if _names(layer, chosen)), default=-1)
    hooks: list[Any] = []
    try:
        for number, layer in enumerate(logging.tqdm(layers[: last + 1], desc="Fine-tuning", unit="layer")):
            groups = [{name: m for name, m in group.items() if name in chosen} for group in layer.groups()]
            groups = [group for group in groups if group]
            seen, exact = inputs_and_outputs(layer, number, batches, exact, groups)
            for group, inputs in zip(groups, seen):
                moments = _moments(layer, number, batches, rounded, group, inputs, config)
                for name, module in group.items():
                    report[name] = _fit(name, module, moments, config, (fisher or {}).get(name))
                    if config.activation_ranges:
                        hooks.append(module.register_forward_pre_hook(_rounding(config.activation_bits)))
            if config.activation_ranges:
                rounded = [batch.calls[number].run(layer.module, x) for batch, x in zip(batches, rounded)]
    finally:
        for hook in hooks:
            hook.remove()
    return report


def inputs_and_outputs(
    layer: ResidualLayer,
    number: int,
    batches: list[RecordedBatch],
    hidden: list[Tensor],
    groups: list[dict[str, nn.Module]],
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The inputs `[N, in]` of each group's linear layers by batch, and the layer's output for each batch."""
    seen: list[list[Tensor]] = [[] for _ in groups]
    outputs = []
    for batch, states in zip(batches, hidden):
        with _watched(groups, lambda group, x: seen[group].append(batch.counted(x))):  # noqa: B023
            outputs.append(batch.calls[number].run(layer.module, states))
    return seen, outputs


def _moments(
    layer: ResidualLayer,
    number: int,
    batches: list[RecordedBatch],
    hidden: list[Tensor],
    group: dict[str, nn.Module],
    inputs: list[Tensor],
    config: LowPrecisionConfig,
) -> tuple[InputMoments, InputMoments]:
    """Of tokens to fit to and of others: inputs, and those that rounded layers before give, rounded themselves."""
    if not config.activation_ranges:
        return tuple(InputMoments.of(part, part) for part in split(inputs))
    rounded: list[Tensor] = []

    def see(_: int, x: Tensor) -> None:
        rounded.append(fake_quantized_activations(batch.counted(x), config.activation_bits))
        raise _Seen

    for batch, states in zip(batches, hidden):
        with _watched([group], see), suppress(_Seen):
            batch.calls[number].run(layer.module, states)
    return tuple(InputMoments.of(*parts) for parts in zip(split(inputs), split(rounded)))


def _fit(
    name: str,
    module: nn.Module,
    moments: tuple[InputMoments, InputMoments],
    config: LowPrecisionConfig,
    fisher: Tensor | None,
) -> dict[str, float]:
    size = group_size_of(module.weight.shape[1], config.weight_bits, config.group_size)
    if not all(torch.isfinite(part.exact).all() and torch.isfinite(part.rounded).all() for part in moments):
        raise ValueError(f"{name}: its inputs are not finite (NaN or infinity) on the calibration data")
    arguments = (
        regularised(module.weight, *moments),
        config.weight_bits,
        size,
        config.qat_steps,
        config.qat_learning_rate,
    )
    try:
        if isinstance(module, LatentProjection) and module.up is not None and not module.full_heads:
            found = reconstruct_latents(module, *arguments, fisher=fisher)
            module.up.copy_(found.up)
        else:
            found = reconstruct(module.weight, *arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    module.weight.copy_(found.weight)
    module.learned_scales = found.scales
    return {"nearest": found.nearest, "error": found.error}


def _names(layer: ResidualLayer, chosen: dict[str, nn.Module]) -> list[str]:
    return [name for group in layer.groups() for name in group if name in chosen]


def _rounding(bits: int) -> Any:
    return lambda module, args: (fake_quantized_activations(args[0], bits), *args[1:])


@contextmanager
def _watched(groups: list[dict[str, nn.Module]], see: Any) -> Iterator[None]:
    """Call `see(group, x)` with the inputs of each group's first layer."""
    hooks = []
    for number, group in enumerate(groups):
        first = next(iter(group.values()))
        hooks.append(first.register_forward_pre_hook(lambda module, args, number=number: see(number, args[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
