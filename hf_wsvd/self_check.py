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

from .cache import WSVDCache
from .calibration import Statistics
from .calibration.answers import divergences
from .calibration.cached_run import run
from .calibration.dense_side import DenseSample, dense_probe
from .quantizer_config import CacheConfig
from .version import __version__


logger = logging.get_logger("hf_wsvd")

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
class Sample(DenseSample):
    """One recorded input and both models' answers to it at N positions.

    Attributes:
        compressed: the compressed model's log-probabilities of the tokens in `top` and of all others together,
            `[N, K + 1]` fp32.
    """

    compressed: Tensor


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


def recorded_dense_side(statistics: Statistics, source: str) -> SelfCheck | None:
    """The dense model's side of a self-check as calibration recorded it.

    Args:
        source: "calibration" takes calibration samples where there are any, "probe" arbitrary tokens.
    """
    if statistics.samples and source == "calibration":
        return _half(statistics.samples, "calibration")
    return None if statistics.probe is None else _half([statistics.probe], "probe")


def measured_dense_side(model: PreTrainedModel) -> SelfCheck | None:
    """The same of a dense model at hand, on arbitrary tokens. None, with a warning, if it cannot be run on them."""
    try:
        return _half([dense_probe(model)], "probe")
    except Exception as error:  # whatever a foreign forward trips over
        warn_of_no_self_check(model, error)
        return None


def attach_self_check(model: PreTrainedModel, dense: SelfCheck | None) -> None:
    """Add the compressed model's side and make the whole the model's self-check; None removes the present one."""
    set_self_check(model, None)
    if dense is None:
        return
    try:
        set_self_check(model, with_answers_of(model, dense))
    except Exception as error:
        warn_of_no_self_check(model, error)


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
    # Without the rounding of packed storage, which is no property of the weights.
    whole = CacheConfig()
    return [
        run(model, sample.inputs, sample.split, sample.top, WSVDCache(model, cache_config=whole))[1:]
        for sample in check.samples
    ]


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


def _half(samples: list[DenseSample], source: str) -> SelfCheck:
    """A self-check in which the dense answers stand in for the compressed model's until it has answered."""
    versions = {"hf_wsvd": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    nothing = Distance(0.0, 1.0, 0)
    both = [Sample(**vars(sample), compressed=sample.dense) for sample in samples]
    return SelfCheck(both, source, "", versions, nothing, nothing)


def warn_of_no_self_check(model: PreTrainedModel, reason: object) -> None:
    """Say that a model is compressed without a self-check, and why."""
    logger.warning(f"hf_wsvd: {type(model).__name__} is compressed without a self-check: {reason}")
