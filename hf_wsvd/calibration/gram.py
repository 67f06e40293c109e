"""Second moments of the inputs of every key and value projection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..decoder import DecoderAttention, decoder_attentions, evaluation_mode
from .batches import recorded_source
from .chat import place
from .data import calibration_info, validate_batches
from .samples import keep_samples


@dataclass
class Statistics:
    """What calibration measured.

    Attributes:
        gram: decoder layer to `E[x x^T]` of its projections' input, `[hidden_size, hidden_size]` fp64, on the CPU.
        info: `samples`, `tokens` and `sha256` of the data, and what is known of their source.
        samples: a few small model inputs out of the data, on the CPU. The checkpoint's self-check stores them; empty
            the list to keep private data out.
    """

    gram: dict[int, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Tensor]] = field(default_factory=list)


@torch.no_grad()
def collect_statistics(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> Statistics:
    """Run `batches` through the dense model and accumulate the input second moment of every attention layer.

    Padding (zeros of `attention_mask`) does not count.

    Args:
        model: not yet compressed.
        batches: model inputs, with `input_ids` or `inputs_embeds`; on any device.

    Raises:
        ValueError: no batch, wrong columns, weights that are offloaded, or activations that are not finite.
    """
    attentions = decoder_attentions(model)
    offloaded = [a.side_name("k") for a in attentions if a.module.k_proj.weight.device.type == "meta"]
    if offloaded:
        raise ValueError(
            f"{offloaded[0]} is offloaded to disk or CPU: calibration needs every weight in memory; load the model "
            "with a device_map that fits, compress and save it, and load the compressed checkpoint with offloading"
        )
    sums = {a.layer: torch.zeros((), dtype=torch.float64) for a in attentions}
    current: dict[str, Any] = {}
    samples: list[dict[str, Tensor]] = []

    def run() -> Iterator[dict[str, Tensor]]:
        for batch in validate_batches(batches, model):
            current["mask"] = batch.get("attention_mask")
            inputs = {name: value for name, value in batch.items() if name != "labels"}  # no loss is needed here
            model(**place(inputs, model), use_cache=False)
            keep_samples(samples, batch, model.dtype)
            yield batch

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        for attention in attentions:
            handle = attention.module.k_proj.register_forward_pre_hook(_accumulate(attention, sums, current))
            stack.callback(handle.remove)
        info = {**calibration_info(run()), **recorded_source(batches)}
    if info["tokens"] == 0:
        raise ValueError("calibration data attend to no token: every attention_mask is zero")
    gram = {layer: total / info["tokens"] for layer, total in sums.items()}
    for attention in attentions:
        if not torch.isfinite(gram[attention.layer]).all():
            raise ValueError(
                f"the inputs of {attention.side_name('k')} are not finite (NaN or infinity) on the calibration data; "
                "check the data, or load the model in bfloat16 or float32"
            )
    return Statistics(gram, info, samples)


def _accumulate(attention: DecoderAttention, sums: dict[int, Tensor], current: dict[str, Any]):
    def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        mask = current["mask"]
        # Some models drop or merge tokens before the decoder; there a mask of another length says nothing.
        x = x[mask.to(x.device).bool()] if mask is not None and mask.shape == x.shape[:2] else x.flatten(0, 1)
        x = x.float()
        sums[attention.layer] = sums[attention.layer] + (x.T @ x).double().cpu()

    return hook
