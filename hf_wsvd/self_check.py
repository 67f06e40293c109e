"""The self-check of a compressed model: how far it was from the dense model at the fit, and whether it still is.

A few inputs are kept with the answers of both models, and `verify` runs the compressed model on them again. They go
through the cache: a prompt, then several tokens at once, then one at a time. A prompt alone would not read a latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .cached_run import DECODED, compared_positions, run, split_of, token_column
from .calibration.answers import divergences
from .probe import probe_tokens
from .version import __version__


logger = logging.get_logger("hf_wsvd")

PROBE_LENGTH = 64
PARTS = ("prefill", "decode")


@dataclass(frozen=True)
class Distance:
    """How far two models' next-token distributions are apart, over `tokens` positions.

    Attributes:
        kl: KL(dense || compressed), nats a token, between the probabilities of the dense model's 64 most likely
            tokens and of all others together: a lower bound of the KL over the whole vocabulary.
        agreement: share of positions with the same most likely token.
        tokens: positions.
    """

    kl: float
    agreement: float
    tokens: int


@dataclass(frozen=True)
class Sample:
    """One recorded input and the answers to it at N positions.

    Attributes:
        inputs: model inputs on the CPU.
        split: tokens of the prompt; the others are decoded.
        top: the dense model's most likely tokens, `[N, K]` int32, most likely first.
        dense, compressed: log-probabilities of these tokens and of all others together, `[N, K + 1]` fp32.
    """

    inputs: dict[str, Tensor]
    split: int
    top: Tensor
    dense: Tensor
    compressed: Tensor

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


@dataclass(frozen=True)
class SelfCheck:
    """What a checkpoint records of itself.

    Attributes:
        samples: inputs and answers.
        source: "calibration" or "probe" (arbitrary tokens, where no calibration sample was at hand).
        dtype: of the model at the fit, such as "float32".
        versions: of hf_wsvd, transformers and torch at the fit.
        prefill, decode: distance to the dense model over the prompts, and over the tokens decoded from the cache.
    """

    samples: list[Sample]
    source: str
    dtype: str
    versions: dict[str, str]
    prefill: Distance
    decode: Distance

    def __deepcopy__(self, memo: dict) -> SelfCheck:
        return self  # nothing writes into it

    def summary(self) -> dict[str, Any]:
        """The numbers as JSON."""
        parts = {part: vars(getattr(self, part)) for part in PARTS}
        return {"source": self.source, "dtype": self.dtype, "samples": len(self.samples), **parts, **self.versions}


def dense_answers(model: PreTrainedModel, samples: list[dict[str, Tensor]]) -> SelfCheck | None:
    """The dense model's side of a self-check: on calibration samples, else on arbitrary tokens.

    None, with a warning, for a model that cannot be run in the way that `run` does it.
    """
    usable = []
    for inputs in samples:
        try:
            usable.append(_dense_sample(model, inputs, split_of(model, inputs)))
        except Exception as error:  # whatever a foreign forward trips over
            logger.info(f"hf_wsvd: a calibration sample is of no use for the self-check: {error}")
    source = "calibration"
    if not usable:
        source, inputs = "probe", {"input_ids": probe_tokens(model, PROBE_LENGTH).cpu()}
        try:
            usable = [_dense_sample(model, inputs, PROBE_LENGTH - DECODED)]
        except Exception as error:
            return _without(model, error)
    versions = {"hf_wsvd": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    nothing = Distance(0.0, 1.0, 0)
    return SelfCheck(usable, source, str(model.dtype).removeprefix("torch."), versions, nothing, nothing)


def attach_self_check(model: PreTrainedModel, dense: SelfCheck | None) -> None:
    """Add the compressed model's side and make the whole the model's self-check; None removes the present one."""
    set_self_check(model, None)
    if dense is None:
        return
    try:
        set_self_check(model, with_answers_of(model, dense))
    except Exception as error:
        _without(model, error)


def self_check_of(model: PreTrainedModel) -> SelfCheck | None:
    """The self-check that a compressed model carries."""
    return getattr(model, "_wsvd_self_check", None)


def set_self_check(model: PreTrainedModel, check: SelfCheck | None) -> None:
    """Let a model carry a self-check; `save_pretrained` writes it."""
    model._wsvd_self_check = check


def with_answers_of(model: PreTrainedModel, check: SelfCheck) -> SelfCheck:
    """`check` with the answers that the compressed model gives now. ValueError if they are not finite."""
    answers = answers_of(model, check)
    samples = [replace(sample, compressed=answer) for sample, (answer, _) in zip(check.samples, answers)]
    parts = distances(check, answers)
    dtype = str(model.dtype).removeprefix("torch.")
    return replace(check, samples=samples, dtype=dtype, **parts)


def answers_of(model: PreTrainedModel, check: SelfCheck) -> list[tuple[Tensor, Tensor]]:
    """For each sample, log-probabilities as in `Sample.compressed`, and the most likely tokens `[N]`."""
    return [run(model, sample.inputs, sample.split, sample.top)[1:] for sample in check.samples]


def distances(check: SelfCheck, answers: list[tuple[Tensor, Tensor]]) -> dict[str, Distance]:
    """Distance of `answers` to the dense ones by part; ValueError if it is not finite."""
    decoded = torch.cat([sample.decoded() for sample in check.samples])
    kl = torch.cat(
        [divergences(sample.dense.double(), answer.double()) for sample, (answer, _) in zip(check.samples, answers)]
    )
    same = torch.cat([sample.top[:, 0] == best for sample, (_, best) in zip(check.samples, answers)])
    chosen = {"prefill": ~decoded, "decode": decoded}
    if not torch.isfinite(kl).all() or not all(of.any() for of in chosen.values()):
        raise ValueError("the answers are not finite, or padding leaves none to compare")
    return {
        part: Distance(kl[of].mean().item(), same[of].double().mean().item(), int(of.sum()))
        for part, of in chosen.items()
    }


def _dense_sample(model: PreTrainedModel, inputs: dict[str, Tensor], split: int) -> Sample:
    top, answer, _ = run(model, inputs, split)
    if answer.isnan().any():
        raise ValueError("the dense model's answers are not finite")
    return Sample(inputs, split, top, answer, answer)


def _without(model: PreTrainedModel, error: Exception) -> None:
    logger.warning(f"hf_wsvd: {type(model).__name__} is compressed without a self-check: {error}")
