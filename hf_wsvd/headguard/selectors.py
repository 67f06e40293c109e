"""Selectors by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..quantizer_config import HeadGuardConfig
from .scoring import HeadScores, Selector


Combine = Callable[[dict[str, Tensor], list[int], HeadGuardConfig], HeadScores]


class Entry(NamedTuple):
    """Where a selector stands and what it needs.

    Attributes:
        module, function: within this package, of a `Selector`.
        data: whether it looks at calibration data.
        images: whether it looks at images alone.
        measured_by: fields of `HeadGuardConfig` that decide what is measured: scores made with others are others.
        combined: whether `module` has a function `combined` that makes scores of `ScoringTask.raw` alone.
    """

    module: str
    function: str
    data: bool = True
    images: bool = False
    measured_by: tuple[str, ...] = ()
    combined: bool = False

    def selector(self) -> Selector:
        """The function itself, imported now."""
        return getattr(importlib.import_module(f".{self.module}", __package__), self.function)

    def combine(self) -> Combine:
        """The function that makes scores of raw measures."""
        return importlib.import_module(f".{self.module}", __package__).combined


ENTRIES = {
    "headguard": Entry(
        "sensitivity", "sensitivity", images=True, measured_by=("image_queries", "text_loss", "answer"), combined=True
    ),
    "output_only": Entry("sensitivity", "sensitivity", measured_by=("text_loss",), combined=True),
    "image_only": Entry(
        "sensitivity", "sensitivity", images=True, measured_by=("image_queries", "answer"), combined=True
    ),
    "restoration": Entry("restoration", "restoration", measured_by=("bits", "tokens", "protect", "rank")),
    "attention_mass": Entry("attention_mass", "attention_mass", images=True, combined=True),
    "key_range": Entry("key_range", "key_range", measured_by=("tokens",), combined=True),
    "retrieval": Entry("retrieval", "retrieval", images=True, combined=True),
    "boundary_layers": Entry("plain", "boundary_layers", data=False),
    "random": Entry("plain", "random", data=False, measured_by=("seed",)),
}
