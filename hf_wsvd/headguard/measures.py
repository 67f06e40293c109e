"""`HeadMeasures`: what was measured of a model's heads, and the guard maps that follow from it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..quantizer_config import GuardMap, HeadGuardConfig
from .scoring import HeadScores
from .selectors import ENTRIES


# Fields of `HeadGuardConfig` that the info of a map records beside the fraction: what the scores depend on.
SCORING_FIELDS = ("sensitivity", "answer", "image_queries", "text_loss", "normalization")
DIGITS = 6  # of the scores in a map: they are for pictures


@dataclass
class HeadMeasures:
    """What one choice of heads was made from.

    Attributes:
        config: it was asked for, `tokens` resolved.
        num_key_value_heads: physical heads of every decoder layer.
        scores: by the options of `config`.
        raw: measures of each sample by name, fp32 `[samples, layers, heads]` with NaN for what does not count; empty
            for selectors that keep none.
        compressed: whether the model's cache holds latents.
        info: of the calibration data: `samples`, `tokens`, `sha256`, `dataset` and so on; empty without data.
    """

    config: HeadGuardConfig
    num_key_value_heads: list[int]
    scores: HeadScores
    raw: dict[str, Tensor] = field(default_factory=dict)
    compressed: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def guard_map(self, config: HeadGuardConfig | None = None) -> GuardMap:
        """The heads with the largest scores; of equal ones those of lower layers, then of lower numbers.

        Args:
            config: other options than those that it was measured with, as far as the measures allow.

        Raises:
            ValueError: options that need another measurement.
        """
        config = self.config if config is None else self.resolved(config)
        key, value = self.scores if config == self.config else self._scores(config)
        count = max(round(config.fraction * sum(self.num_key_value_heads)), 1)
        sides = {"key": key, "value": value} if config.protect == "kv" else {"key": key}
        # Two sides that are scored alike are one picture.
        shown = {"key": key} if key is value or torch.equal(key, value) else {"key": key, "value": value}
        return GuardMap(
            **{side: self._guarded(scores, count, config.bits) for side, scores in sides.items()},
            num_key_value_heads=self.num_key_value_heads,
            tokens=config.tokens,
            selector=config.selector,
            scores={side: self._rows(scores) for side, scores in shown.items()},
            info=self._record(config),
        )

    def resolved(self, config: HeadGuardConfig) -> HeadGuardConfig:
        """`config` with the tokens of this measurement where it leaves them open. ValueError as for `guard_map`."""
        config = dataclasses.replace(config, tokens=config.tokens or self.config.tokens, guard_map=None)
        entry, own = ENTRIES[config.selector], ENTRIES[self.config.selector]
        related = config.selector == self.config.selector or (
            self.config.selector == "headguard" and entry.module == own.module
        )
        if not related:
            raise ValueError(
                f"selector={config.selector!r} is not allowed: the scores are those of {self.config.selector!r}"
            )
        for name in entry.measured_by:
            given, held = getattr(config, name), getattr(self.config, name)
            # The gradient of a probability is that of its logarithm times the probability.
            if given != held and not (name == "answer" and "candidate_probability" not in (given, held)):
                raise ValueError(f"{name}={given!r} is not allowed: the scores were measured with {name}={held!r}")
        return config

    def _scores(self, config: HeadGuardConfig) -> HeadScores:
        entry = ENTRIES[config.selector]
        return entry.combine()(self.raw, self.num_key_value_heads, config) if entry.combined else self.scores

    def _guarded(self, scores: Tensor, count: int, bits: int) -> dict[int, dict[int, int]]:
        """Layer to head to bits of the `count` largest scores."""
        heads = [(layer, head) for layer, own in enumerate(self.num_key_value_heads) for head in range(own)]
        # A stable sort of heads in their order.
        chosen = sorted(heads, key=lambda at: -scores[at].item())[:count]
        guarded: dict[int, dict[int, int]] = {}
        for layer, head in chosen:
            guarded.setdefault(layer, {})[head] = bits
        return guarded

    def _rows(self, scores: Tensor) -> list[list[float]]:
        return [
            [significant(value) for value in row[:heads].tolist()]
            for row, heads in zip(scores, self.num_key_value_heads)
        ]

    def _record(self, config: HeadGuardConfig) -> dict[str, Any]:
        """What a checkpoint keeps of how the heads were chosen, JSON-safe."""
        entry = ENTRIES[config.selector]
        record: dict[str, Any] = {"fraction": config.fraction, "protect": config.protect, "bits": config.bits}
        if entry.module == "sensitivity":
            record.update({name: getattr(config, name) for name in SCORING_FIELDS})
        if not entry.data:
            return {**record, "seed": config.seed} if config.selector == "random" else record
        measured_on = "compressed" if self.compressed else "dense"
        return {**record, "scores_on": measured_on, "calibration": self.info}


def significant(value: float, digits: int = DIGITS) -> float:
    """`value` to so many significant digits."""
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.{digits - 1}e}")
