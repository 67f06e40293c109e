"""Guard maps for the cells of benchmarks/headguard.py: every score is measured once, and how scores agree."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headguard_choices import FRACTIONS, Base, Choice, seeds_of
from hf_wsvd.calibration.batches import CalibrationSet
from hf_wsvd.headguard import HeadMeasures, measure_heads
from hf_wsvd.quantizer_config import GuardMap, HeadGuardConfig


# Selectors whose scores come out of another one's measurement.
MEASURED_AS = {"output_only": "headguard", "image_only": "headguard"}


class Scores:
    """Measures of one model's heads by selector, calibration seed and, for "restoration", storage.

    Args:
        data: labelled batches by calibration seed.

    Attributes:
        seconds: that measuring took, by selector.
    """

    def __init__(self, model: PreTrainedModel, data: dict[int, CalibrationSet]):
        self.model, self.data = model, data
        self.measures: dict[tuple, HeadMeasures] = {}
        self.seconds: dict[str, float] = {}

    def guard_map(self, choice: Choice) -> GuardMap:
        """The heads of a cell."""
        config = HeadGuardConfig(
            fraction=choice.fraction,
            selector=choice.selector,
            protect=choice.protect,
            tokens="image",
            bits=choice.guard_bits,
            seed=choice.seed if choice.selector == "random" else 0,
        )
        return self.measured(config, choice.base, choice.seed).guard_map(config)

    def measured(self, config: HeadGuardConfig, base: Base, seed: int) -> HeadMeasures:
        """The measurement that a map by `config` follows from."""
        name = MEASURED_AS.get(config.selector, config.selector)
        key: tuple = (name, seed)
        if name == "restoration":  # it measures what this storage does to each head
            key += (base, config.protect, config.bits)
        if key not in self.measures:
            start = time.perf_counter()
            data = self.data.get(seed)
            # Heads are chosen in rounds: those of a larger fraction hold those of all smaller ones.
            asked = dataclasses.replace(config, selector=name, fraction=max(FRACTIONS))
            self.measures[key] = measure_heads(self.model, data, asked, cache=base.config)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return self.measures[key]

    def agreement(self, selectors: list[str], base: Base, seeds: list[int]) -> list[dict[str, Any]]:
        """How "headguard" of the first seed ranks heads beside every other selector and seed, keys alone.

        Entries hold selector, seed, Spearman's rank correlation and the share of the guarded heads in common by
        fraction (chance gives the fraction itself).
        """
        first = HeadGuardConfig(selector="headguard", tokens="image", protect="k")
        own = self.measured(first, base, seeds[0])
        entries = []
        for selector in selectors:
            for seed in seeds_of(selector, seeds):
                if (selector, seed) == ("headguard", seeds[0]):
                    continue
                drawn = seed if selector == "random" else 0
                config = dataclasses.replace(first, selector=selector, seed=drawn)
                other = self.measured(config, base, seed)
                pair = [finite(m, c) for m, c in ((own, first), (other, config))]
                shared = {}
                for fraction in FRACTIONS:
                    maps = [
                        m.guard_map(dataclasses.replace(c, fraction=fraction))
                        for m, c in ((own, first), (other, config))
                    ]
                    chosen = [{(guard.layer, guard.head) for guard in found} for found in maps]
                    shared[f"{fraction:g}"] = len(chosen[0] & chosen[1]) / len(chosen[0])
                entries.append({"selector": selector, "seed": seed, "spearman": spearman(*pair), "overlap": shared})
        return entries


def finite(measures: HeadMeasures, config: HeadGuardConfig) -> Tensor:
    """The key scores of all heads that there are, as the map of `config` records them."""
    rows = measures.guard_map(config).scores["key"]
    return torch.tensor([score for row in rows for score in row], dtype=torch.float64)


def spearman(first: Tensor, second: Tensor) -> float:
    """Spearman's rank correlation of two vectors, equal numbers sharing their mean rank; 0 where one is constant."""
    ranks = torch.stack([mean_ranks(first), mean_ranks(second)])
    ranks = ranks - ranks.mean(1, keepdim=True)
    norms = ranks.norm(dim=1)
    return 0.0 if bool((norms == 0).any()) else float(ranks[0] @ ranks[1] / norms.prod())


def mean_ranks(values: Tensor) -> Tensor:
    """Ranks from 0, the mean one for equal values, fp64."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts + 1) / 2)[place]
