"""Proof that a transform of a layer's activations lies in its weights exactly, on a copy in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from .replay import RecordedBatch
from .residual_layers import ResidualLayer, UnknownStructure


TOLERANCE = 1e-4  # of a layer's output, relative
Change = Callable[[ResidualLayer], None]


@torch.no_grad()
def check_absorption(
    layers: list[ResidualLayer], batch: RecordedBatch, change: Change, turned: Tensor | None = None
) -> None:
    """Apply `change` to a copy of every layer, and compare its output on one batch with the layer's own.

    Args:
        batch: what the layers are run on.
        change: changes a layer in place so that it computes the same.
        turned: `[hidden, hidden]`, if the changed layer is to compute on hidden states turned by it.

    Raises:
        UnknownStructure: a layer whose changed copy does not compute the same.
    """
    hidden = batch.hidden
    for number, layer in enumerate(layers):
        call = batch.calls[number]
        if turned is not None and call.entering is not None:
            raise UnknownStructure(f"something is added to the hidden states before {layer.name}")
        following = call.run(layer.module, hidden)
        changed = copy.deepcopy(layer.module).float()
        states, expected = hidden.float(), following
        if hidden.dtype != torch.float32:
            expected = call.run(changed, states)
        change(ResidualLayer(layer.name, changed))
        if turned is None:
            found = call.run(changed, states)
        else:
            rotation = turned.to(states)
            found = call.run(changed, states @ rotation) @ rotation.T
        error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise UnknownStructure(f"{layer.name} does not compute the same with it (relative error {error:.1e})")
        hidden = following
