"""How a dense model is run forward and backward: frozen weights, and layers that are recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..decoder import DecoderAttention


# Gradients of half-precision models would vanish in fp16; a power of two scales them without rounding.
FP16_LOSS_SCALE = 2.0**12


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter takes a gradient inside; outside each is as it was."""
    taking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in taking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in taking:
            parameter.requires_grad_(True)


@contextmanager
def recomputed(model: PreTrainedModel, attentions: list[DecoderAttention]) -> Iterator[None]:
    """Every decoder layer keeps its input alone for the backward pass and runs again there."""
    layers = [model.get_submodule(attention.name.rpartition(".")[0]) for attention in attentions]
    forwards = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in forwards:
            if forward is None:
                del layer.forward
            else:  # a hook of accelerate
                layer.forward = forward
