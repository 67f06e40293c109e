"""What benchmarks/headguard.py measures: bases, choices of heads, and uniform storage to compare them with."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hf_wsvd.quantizer_config import KIVI_GROUP_SIZE, CacheConfig, GuardMap
from hf_wsvd.quantizer_config.guard_map import SIDES


FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
PROTECT = ("k", "kv")
# Selectors that look at data are run once a calibration seed.
FROM_DATA = ("headguard", "output_only", "image_only", "restoration", "attention_mass", "key_range", "retrieval")
SELECTORS = (*FROM_DATA, "boundary_layers", "random")
MAIN_SELECTORS = ("headguard", "restoration", "random")
RANDOM_DRAWS = 5


@dataclass(frozen=True)
class Base:
    """Storage of image tokens in all heads that are not guarded."""

    scheme: str
    key_bits: int
    value_bits: int
    group_size: int | None = None

    @property
    def config(self) -> CacheConfig:
        """Text is kept in the model's dtype, as in the paper."""
        window = None
        if self.scheme == "kivi":  # the published window of 128 would hold nearly all of the 144 image tokens
            window = self.group_size or KIVI_GROUP_SIZE
        return CacheConfig(
            scheme=self.scheme,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            group_size=self.group_size,
            residual_length=window,
            text_bits=16,
        )

    @property
    def label(self) -> str:
        """As tables show it: `minmax K4 V2, groups of 32`."""
        equal = self.key_bits == self.value_bits
        bits = f"{self.key_bits} bit" if equal else f"K{self.key_bits} V{self.value_bits}"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        return f"{self.scheme} {bits}{groups}"

    @property
    def row(self) -> dict[str, Any]:
        """Its fields in a row of results."""
        equal = self.key_bits == self.value_bits
        fields = {"scheme": self.scheme, "bits": self.key_bits if equal else None}
        return {**fields, "key_bits": self.key_bits, "value_bits": self.value_bits, "group_size": self.group_size}


BASES = [
    *(Base("hadamard", 2, 2), Base("minmax", 2, 2), Base("minmax", 2, 2, 32)),
    Base("kivi", 2, 2),  # the package's KIVI has 4 and 2 bits
    *(Base("hadamard", 3, 3), Base("minmax", 3, 3), Base("minmax", 3, 3, 32)),
]
UNIFORM = [
    *(
        Base(scheme, key, value, group)
        for scheme, group in product(("minmax", "hadamard"), (None, 32, 16))
        for key, value in product((2, 3, 4, 8), repeat=2)
    ),
    *(Base("kivi", key, value, group) for group in (None, 16) for key, value in product((2, 4), repeat=2)),
    *(Base("turboquant", key, value) for key, value in product((2, 3, 4), repeat=2)),
]
# What few bits can buy: coarse bases whose guarded heads are packed too.
RECIPE_BASES = [Base("hadamard", 2, 2), Base("turboquant", 2, 2)]
RECIPE_GUARD_BITS = (3, 4, 8)
RECIPE_SELECTORS = ("headguard", "restoration")


@dataclass(frozen=True)
class Choice:
    """One cell of the table: a base and the heads that are guarded over it."""

    base: Base
    selector: str = "none"
    fraction: float = 0.0
    protect: str | None = None
    guard_bits: int | None = None
    seed: int | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What identifies its rows."""
        fields = {"selector": self.selector, "fraction": self.fraction, "protect": self.protect}
        return {**self.base.row, **fields, "guard_bits": self.guard_bits, "seed": self.seed}


def table_choices(base: Base, selectors: list[str], seeds: list[int], cache: str = "dense") -> Iterator[Choice]:
    """The table over one base: no guards, then selectors, fractions and protections.

    Those that are there for comparison alone are measured where two bits ruin most, over dense heads of two bits, and
    for keys, next to which values bring little; keys and values at three bits likewise.
    """
    yield Choice(base)
    for selector in selectors:
        compared = selector not in MAIN_SELECTORS
        if compared and (cache == "latent" or base.key_bits > 2):
            continue
        protections = ("k",) if compared or base.key_bits > 2 else PROTECT
        for seed in seeds_of(selector, seeds):
            for fraction, protect in product(FRACTIONS, protections):
                yield Choice(base, selector, fraction, protect, 16, seed)


def recipe_choices(base: Base, selectors: list[str], seeds: list[int], cache: str = "dense") -> Iterator[Choice]:
    """Keys guarded at few bits, of the first calibration seed; over dense heads (latents of 4 bits need no guards)."""
    yield Choice(base)
    if cache == "latent":
        return
    for selector in RECIPE_SELECTORS:
        if selector in selectors:
            for guard_bits, fraction in product(RECIPE_GUARD_BITS, FRACTIONS):
                yield Choice(base, selector, fraction, "k", guard_bits, seeds[0])


def seeds_of(selector: str, seeds: list[int]) -> list[int]:
    """Calibration seeds of a selector, draws of "random", one for what depends on neither."""
    if selector == "random":
        return list(range(RANDOM_DRAWS))
    return seeds if selector in FROM_DATA else [0]


def guarded_heads(guard_map: GuardMap) -> Tensor:
    """bool `[2, L, H]`: keys and values that a map guards."""
    counts = guard_map.num_key_value_heads
    guarded = torch.zeros(2, len(counts), max(counts), dtype=torch.bool)
    for guard in guard_map:
        guarded[SIDES.index(guard.side), guard.layer, guard.head] = True
    return guarded
