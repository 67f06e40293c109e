"""`HeadGuardConfig`: how the guarded heads of a model are chosen (HeadGuard, arXiv 2609.35800)."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn

from .guard_map import GUARD_BITS, TOKEN_CLASSES, GuardMap


SELECTORS = (
    "restoration",
    "headguard",
    "output_only",
    "image_only",
    "attention_mass",
    "key_range",
    "retrieval",
    "boundary_layers",
    "random",
)
CHOICES = {
    "selector": SELECTORS,
    "protect": ("k", "kv"),
    "tokens": (*TOKEN_CLASSES, None),
    "bits": GUARD_BITS,
    "rank": ("latent", "full"),
    "scores_on": ("compressed", "dense"),
    "sensitivity": ("absolute", "squared", "signed", "absolute_mean"),
    "answer": ("probability", "log_probability", "candidate_probability"),
    "image_queries": ("all", "text", "answer"),
    "text_loss": ("prompt", "all"),
    "normalization": ("global", "layer"),
}
# Fields that not every selector knows, and those that do.
SELECTORS_WITH = {
    "sensitivity": ("headguard", "output_only", "image_only"),
    "answer": ("headguard", "image_only"),
    "image_queries": ("headguard", "image_only"),
    "text_loss": ("headguard", "output_only"),
    "normalization": ("headguard", "output_only", "image_only", "key_range"),
    "seed": ("random",),
}


@dataclass
class HeadGuardConfig:
    """A small share of the physical KV heads keeps its image tokens in high precision.

    Args:
        fraction: of all KV heads of the decoder, in (0, 1]; round(fraction * heads) are guarded.
        selector: what ranks the heads. Our own: "restoration" (how much of the loss that the packed cache causes each
            head causes), the best at few bits. From the paper: "headguard" (image sensitivity + output sensitivity),
            "output_only", "image_only". For comparison: "attention_mass" (on image keys), "key_range" (norm of the key
            bias and range of key channels), "retrieval" (how often a head looks first at the evidence),
            "boundary_layers" (first and last), "random".
        protect: "k": guarded heads keep their keys; "kv": keys and values.
        tokens: "image" (tokens of images and videos), "all", or None: "image" for a model that reads images.
        bits: that guarded heads keep, more than the others: 16 (the model's dtype), 8, 4 or 3.
        rank: of guarded heads over latents: "latent" (the layer's rank) or "full" (`head_dim`: not cut at all).
        scores_on: measure "compressed" or "dense" heads; the same for a model that is not compressed.
        sensitivity: of a head from the gradients of its samples: mean of the "absolute" values, of the "squared", of
            the "signed", or "absolute_mean", the absolute value of the mean.
        answer: whose gradient the image sensitivity is: the right answer's "probability", its "log_probability", or
            "candidate_probability", among the tokens that stand there in any answer of the calibration set.
        image_queries: queries that the image gate acts on: "all", those of "text", or those that predict the "answer".
        text_loss: tokens of the loss of the output sensitivity: the "prompt"'s text, or "all" text, answer included.
        normalization: z-scores over all heads ("global") or over those of each layer ("layer").
        seed: of "random".
        guard_map: a finished map (a `GuardMap`, a dict of its fields, or the path of its JSON file): nothing is
            measured then. Written by the fit.

    Raises:
        ValueError: naming the field, the value given and what is allowed.
    """

    fraction: float = 0.125
    selector: str = "restoration"
    protect: str = "k"
    tokens: str | None = None
    bits: int = 16
    rank: str = "latent"
    scores_on: str = "compressed"
    sensitivity: str = "absolute"
    answer: str = "probability"
    image_queries: str = "all"
    text_loss: str = "prompt"
    normalization: str = "global"
    seed: int = 0
    guard_map: GuardMap | dict[str, Any] | str | PathLike[str] | None = None

    def __post_init__(self):
        fraction = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            fail("fraction", fraction, "a number in (0, 1]")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, bool | float | list | dict) or value not in choices:
                fail(name, value, f"one of {choices}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            fail("seed", self.seed, "an integer from 0 to 2**63 - 1")
        for name, selectors in SELECTORS_WITH.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and self.selector not in selectors:
                fail(name, getattr(self, name), f"{default!r} with selector={self.selector!r}, which does not use it")
        self.guard_map = GuardMap.parse(self.guard_map)

    @classmethod
    def parse(cls, value: HeadGuardConfig | GuardMap | dict[str, Any] | None) -> HeadGuardConfig | None:
        """A config, one of a finished `GuardMap`, or the dict form that JSON keeps of it.

        ValueError for anything else and for unknown keys.
        """
        if value is None or isinstance(value, HeadGuardConfig):
            return value
        if isinstance(value, GuardMap):
            return cls(guard_map=value)
        if not isinstance(value, dict):
            fail("HeadGuardConfig", value, "a HeadGuardConfig, a dict of its fields, or None")
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"HeadGuardConfig: unknown field {name!r}{hint}; allowed: {known}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, JSON-safe."""
        changed = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if getattr(self, entry.name) != entry.default
        }
        if self.guard_map is not None:
            changed["guard_map"] = self.guard_map.to_dict()
        return changed


def fail(field_name: str, value: Any, allowed: str) -> NoReturn:
    """The form of this file's errors."""
    raise ValueError(f"HeadGuardConfig: {field_name}={value!r:.200} is not allowed; allowed: {allowed}")
