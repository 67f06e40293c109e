"""What calibration measured of a dense model: all that a fit needs, whatever its method, ranks and refinement."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .answers import Answered
from .dense_side import DenseSample


Side = tuple[int, str]  # decoder layer number and projection: "q", "k" or "v"

SIDES = ("q", "k", "v")


@dataclass
class Statistics:
    """Second moments of a dense model over a calibration set. All tensors are on the CPU.

    Attributes:
        gram: decoder layer to `E[x x^T]` over tokens of its projections' input, `[in_features, in_features]` fp64.
        output: projection to `E[y y^T]` of each head's output without its bias, `[heads, head_dim, head_dim]` fp64.
        weight: projection to `W_h W_h^T` of each head's dense weight, `[heads, head_dim, head_dim]` fp64.
        gradient: projection to the second moment of the loss's gradient by each head's output, summed over a
            sequence's tokens and averaged over sequences that all weigh the same, `[heads, head_dim, head_dim]` fp64.
            The loss is the answer's negative log-likelihood in nats.
        fisher: projection to the mean over sequences of the squared gradient by each weight,
            `[heads * head_dim, in_features]` fp32 (WSVD's `F`); empty unless it was asked for.
        answered: the calibration inputs with the dense model's answers: what the factors are refined on.
        samples: a few small model inputs out of the data with the dense model's answers. The checkpoint's self-check
            stores them; empty the list to keep private data out.
        probe: the dense model's answers to arbitrary tokens, which the self-check takes where `samples` is empty;
            None if the model cannot be run on them.
        info: `samples`, `tokens` and `sha256` of the data, and what is known of their source.
    """

    gram: dict[int, Tensor] = field(default_factory=dict)
    output: dict[Side, Tensor] = field(default_factory=dict)
    weight: dict[Side, Tensor] = field(default_factory=dict)
    gradient: dict[Side, Tensor] = field(default_factory=dict)
    fisher: dict[Side, Tensor] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)
    samples: list[DenseSample] = field(default_factory=list)
    probe: DenseSample | None = None
    info: dict[str, Any] = field(default_factory=dict)


def is_statistics(calibration: Any) -> bool:
    """Whether a `calibration` argument is statistics or names their file; if not, it is data to calibrate on."""
    return isinstance(calibration, Statistics | str | os.PathLike)


def given_statistics(calibration: Any) -> Statistics | None:
    """The statistics that a `calibration` argument is or names; None for data to calibrate on."""
    if not is_statistics(calibration):
        return None
    if isinstance(calibration, Statistics):
        return calibration
    from . import load_statistics

    return load_statistics(calibration)
