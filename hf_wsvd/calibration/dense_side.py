"""The dense model's side of a checkpoint's self-check: a few inputs with what the dense model answers to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..probe import probe_tokens
from .batches import Batch
from .cached_run import DECODED, compared_positions, run, split_of, token_column


logger = logging.get_logger("hf_wsvd")

PROBE_LENGTH = 64


@dataclass(frozen=True)
class DenseSample:
    """One recorded input and the dense model's answers to it at N positions.

    Attributes:
        inputs: model inputs on the CPU.
        split: tokens of the prompt; the others are decoded.
        top: the dense model's most likely tokens, `[N, K]` int32, most likely first.
        dense: log-probabilities of these tokens and of all others together, `[N, K + 1]` fp32.
    """

    inputs: Batch
    split: int
    top: Tensor
    dense: Tensor

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return token_column(self.inputs).shape[1]

    def compared(self) -> Tensor:
        """bool `[B, P]`: which of the last P positions are compared, padding left out."""
        return compared_positions(self.inputs)

    def decoded(self) -> Tensor:
        """bool `[N]`: which of the compared positions were decoded."""
        compared = self.compared()
        column = torch.arange(self.length - compared.shape[1], self.length, device=compared.device)
        return (column >= self.split).expand_as(compared)[compared]


def dense_samples(model: PreTrainedModel, samples: list[Batch]) -> list[DenseSample]:
    """The samples that a dense model can be run on in the way that `run` does it, with its answers."""
    usable = []
    for inputs in samples:
        try:
            usable.append(_dense_sample(model, inputs, split_of(model, inputs)))
        except Exception as error:  # whatever a foreign forward trips over
            logger.info(f"hf_wsvd: a calibration sample is of no use for the self-check: {error}")
    return usable


def dense_probe(model: PreTrainedModel) -> DenseSample:
    """A dense model's answers to arbitrary tokens, for a self-check without calibration data.

    Raises whatever the model raises that cannot be run in this way, ValueError for answers that are not finite.
    """
    return _dense_sample(model, {"input_ids": probe_tokens(model, PROBE_LENGTH).cpu()}, PROBE_LENGTH - DECODED)


def recorded_probe(model: PreTrainedModel) -> DenseSample | None:
    """`dense_probe`; None for a model that cannot be run in this way."""
    try:
        return dense_probe(model)
    except Exception as error:
        logger.info(f"hf_wsvd: no answers to arbitrary tokens for the self-check: {error}")
        return None


def _dense_sample(model: PreTrainedModel, inputs: Batch, split: int) -> DenseSample:
    top, answer, _ = run(model, inputs, split)
    if answer.isnan().any():
        raise ValueError("the dense model's answers are not finite")
    sample = DenseSample(inputs, split, top, answer)
    decoded = sample.decoded()
    if bool(decoded.all()) or not bool(decoded.any()):
        raise ValueError("padding leaves no position to compare in the prompt or after it")
    return sample
