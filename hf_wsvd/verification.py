"""Whether a loaded model still gives the answers that its checkpoint recorded at the fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import bound_layers
from .calibration.answers import divergences
from .calibration.data import validate_batches
from .low_precision.convert import quantized_modules
from .self_check import (
    PARTS,
    Distance,
    SelfCheck,
    answers_of,
    distances,
    set_self_check,
    with_answers_of,
)
from .self_check_file import SELF_CHECK_FILE, obtain_self_check


@dataclass(frozen=True)
class Tolerance:
    """What rounding may change. Devices, kernels and versions of transformers differ by less than the dtype does.

    Attributes:
        kl_factor, kl_slack: KL to the dense model may reach the larger of recorded times, and recorded plus, these.
        agreement: share of positions whose most likely token may differ from the dense one in addition.
        drift: nats a token between the recorded and the present answers of the compressed model.
    """

    kl_factor: float
    kl_slack: float
    agreement: float
    drift: float


FULL_PRECISION = Tolerance(kl_factor=2.0, kl_slack=0.02, agreement=0.02, drift=0.001)
HALF_PRECISION = Tolerance(kl_factor=2.0, kl_slack=0.1, agreement=0.05, drift=0.05)
SPARE_POSITIONS = 2  # that may differ in addition: among a few tens, one is more than a tolerated share


@dataclass(frozen=True)
class Verification:
    """Recorded and recomputed numbers of a self-check, by part ("prefill", "decode").

    Attributes:
        recorded, recomputed: distance to the dense model, at the fit and now.
        drift: KL(answers at the fit || answers now) of the compressed model, nats a token.
        dtype: of the model now.
        problems: what is beyond the tolerance, in words; empty if the model is what was saved.
    """

    recorded: dict[str, Distance]
    recomputed: dict[str, Distance]
    drift: dict[str, float]
    dtype: str
    tolerance: Tolerance
    problems: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        numbers = {
            part: {
                "recorded": vars(self.recorded[part]),
                "recomputed": vars(self.recomputed[part]),
                "drift": self.drift[part],
            }
            for part in PARTS
        }
        return {
            "passed": self.passed,
            "dtype": self.dtype,
            **numbers,
            "tolerance": vars(self.tolerance),
            "problems": self.problems,
        }


def verify(model: PreTrainedModel) -> Verification:
    """Run a compressed model on the inputs of its self-check and compare with what was recorded at the fit.

    Prompts and decoding from the latent cache are compared apart. For a model from the Hub the self-check is
    downloaded if it is not in the Hub cache beside the weights.

    Args:
        model: compressed, in any dtype and on any devices; its mode and the random state are left as they were.

    Returns:
        The numbers, and `passed`. Weights trained after the fit do not pass; see `renew_self_check`.

    Raises:
        ValueError: the model is not compressed, carries no self-check, or the self-check does not fit it.
    """
    check = _required(model, "verify")
    try:
        answers = answers_of(model, check)
        recomputed = distances(check, answers)
    except Exception as error:  # whatever a forward trips over on inputs that were not made for it
        raise ValueError(f"verify: {type(model).__name__} cannot run on its self-check: {error}") from error
    decoded = torch.cat([sample.decoded() for sample in check.samples])
    pairs = [(sample.compressed.double(), answer.double()) for sample, (answer, _) in zip(check.samples, answers)]
    change = torch.cat([divergences(*pair) for pair in pairs])
    drift = {"prefill": change[~decoded].mean().item(), "decode": change[decoded].mean().item()}
    dtype = str(model.dtype).removeprefix("torch.")
    half = {"float16", "bfloat16"} & {dtype, check.dtype}
    tolerance = HALF_PRECISION if half else FULL_PRECISION
    recorded = {part: getattr(check, part) for part in PARTS}
    problems = [
        problem
        for part in PARTS
        for problem in problems_of(part, recorded[part], recomputed[part], drift[part], tolerance)
    ]
    return Verification(recorded, recomputed, drift, dtype, tolerance, problems)


def problems_of(part: str, recorded: Distance, recomputed: Distance, drift: float, tolerance: Tolerance) -> list[str]:
    """What is beyond the tolerance, in words."""
    problems = []
    limit = max(tolerance.kl_factor * recorded.kl, recorded.kl + tolerance.kl_slack)
    if recomputed.kl > limit:
        problems.append(f"{part}: KL {recomputed.kl:.4f}, recorded {recorded.kl:.4f}, allowed {limit:.4f}")
    lowest = recorded.agreement - tolerance.agreement - SPARE_POSITIONS / recorded.tokens
    if recomputed.agreement < lowest:
        problems.append(
            f"{part}: agreement {recomputed.agreement:.1%}, recorded {recorded.agreement:.1%}, allowed {lowest:.1%}"
        )
    if not drift <= tolerance.drift:
        problems.append(f"{part}: answers {drift:.4f} nats from the recorded ones, allowed {tolerance.drift:.4f}")
    return problems


def renew_self_check(model: PreTrainedModel) -> SelfCheck:
    """Record the answers that a compressed model gives now, after training for instance, in place of those of the fit.

    Inputs and answers of the dense model stay. `save_pretrained` writes the new record.

    Raises:
        ValueError: as `verify`.
    """
    check = with_answers_of(model, _required(model, "renew_self_check"))
    set_self_check(model, check)
    return check


def _required(model: PreTrainedModel, function: str) -> SelfCheck:
    """The model's self-check, with inputs that its forward takes."""
    compressed = isinstance(model, PreTrainedModel) and (bound_layers(model) or quantized_modules(model))
    if not compressed:
        raise ValueError(f"{function}: {type(model).__name__} holds no layer compressed by hf_wsvd")
    check = obtain_self_check(model)
    if check is None:
        raise ValueError(f"{function}: {type(model).__name__} carries no self-check ({SELF_CHECK_FILE})")
    for _ in validate_batches([sample.inputs for sample in check.samples], model, description="Checking"):
        pass
    return check
