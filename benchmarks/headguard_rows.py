"""Rows of docs/results/headguard_vlm.json: accuracies, bits, and the uniform storage that each must beat."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accuracy_measure import share_right
from accuracy_tasks import MEAN_OF
from headguard_choices import Base, Choice
from headguard_heads import Heads, Packed


TOLERANCE = 0.02  # bits an element by which a uniform control may exceed the row it stands beside
CELL = (
    "cache",
    "scheme",
    "key_bits",
    "value_bits",
    "group_size",
    "selector",
    "fraction",
    "protect",
    "guard_bits",
    "seed",
)  # what rows of one cell have in common
UNIFORM_CELL = CELL[:5]


@dataclass(frozen=True)
class Bits:
    """Bits of a number of the dense cache.

    Attributes:
        image: of image tokens: payload, scales, guarded heads, exact windows.
        whole_cache: the same over all tokens of the prompt, text in the model's dtype.
        slack: allocated beside them for image tokens, in neither of the two.
    """

    image: float
    whole_cache: float
    slack: float


def bits_of(heads: Heads, base: Packed | None, guarded: Tensor | None = None, guard: Packed | None = None) -> Bits:
    """Bits of what `Evaluator.right` reads with the same arguments, from the bytes that real stores hold."""
    layers, count, width = heads.shape
    exact = heads.exact_used()[:, :, None].expand(2, layers, count)
    used, slack = exact, torch.zeros_like(exact)
    if base is not None:
        used, slack = base.used[:, :, None].expand_as(exact), base.slack[:, :, None].expand_as(exact)
        if guarded is not None:
            used = torch.where(guarded, exact if guard is None else guard.used[:, :, None], used)
            slack = torch.where(guarded, slack.new_zeros(()) if guard is None else guard.slack[:, :, None], slack)
    image, text, beside = (8 * float(side.mean()) / width for side in (used, exact, slack))
    tokens = sum(len(batch.embeds) * batch.prompt for batch in heads.batches)
    share = sum(len(batch.embeds) * (batch.image.stop - batch.image.start) for batch in heads.batches) / tokens
    return Bits(image, share * image + (1 - share) * text, beside)


def rows_of(
    cache: str, choice: Choice, right: Tensor, kinds: list[str], bits: Bits, by_type: bool = True
) -> list[dict[str, Any]]:
    """A row for the mean of the types of question and, if `by_type`, a shorter one for each type."""
    types = torch.tensor([MEAN_OF.index(kind) for kind in kinds])
    accuracy = {kind: share_right(right[types == number]).value for number, kind in enumerate(MEAN_OF)}
    identity = {"cache": cache, **choice.row}
    short = {name: value for name, value in identity.items() if name not in ("key_bits", "value_bits", "guard_bits")}
    rows = [
        {**short, "question_type": kind, "accuracy": round(value, 5), "bits_per_element": round(bits.image, 4)}
        for kind, value in accuracy.items()
        if by_type
    ]
    mean = {
        **identity,
        "question_type": "mean",
        "accuracy": round(sum(accuracy.values()) / len(accuracy), 5),
        "bits_per_element": round(bits.image, 4),
        "whole_cache_bits_per_element": round(bits.whole_cache, 4),
        "slack_bits_per_element": round(bits.slack, 4),
    }
    return [*rows, mean]


def uniform_rows(cache: str, base: Base, right: Tensor, kinds: list[str], bits: Bits) -> list[dict[str, Any]]:
    """The same of uniform storage."""
    unused = ("selector", "fraction", "protect", "guard_bits", "seed")
    return [
        {"label": base.label, **{name: value for name, value in row.items() if name not in unused}}
        for row in rows_of(cache, Choice(base), right, kinds, bits)
    ]


def known_cells(rows: list[dict[str, Any]], names: tuple[str, ...] = CELL) -> set[tuple]:
    """What identifies the cells that there are rows of."""
    return {tuple(row[name] for name in names) for row in rows if row.get("question_type", "mean") == "mean"}


def add_controls(results: dict[str, Any]) -> None:
    """Beside every row the best uniform storage at no more bits, of its own scheme and of all.

    The best is the best by mean accuracy; its accuracy is given for the row's type of question (that of all schemes
    for the mean alone). None where every uniform storage of the scheme takes more.
    """
    curves: dict[tuple, list[tuple[float, float, str]]] = {}
    accuracy: dict[tuple, float] = {}
    for row in results["uniform"]:
        accuracy[row["cache"], row["label"], row["question_type"]] = row["accuracy"]
        if row["question_type"] == "mean":
            point = (row["bits_per_element"], row["accuracy"], row["label"])
            for scheme in (row["scheme"], None):
                curves.setdefault((row["cache"], scheme), []).append(point)
    for row in results["rows"]:
        for scheme, prefix in ((row["scheme"], "uniform_control"), (None, "best_uniform")):
            points = curves.get((row["cache"], scheme), [])
            afforded = [point for point in points if point[0] <= row["bits_per_element"] + TOLERANCE]
            best = max(afforded, key=lambda point: (point[1], -point[0]), default=None)
            if row["question_type"] == "mean":
                row[prefix] = best and best[2]
            elif scheme is None:
                continue
            row[f"{prefix}_accuracy"] = best and accuracy[row["cache"], best[2], row["question_type"]]


def written(results: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for name, value in results.items():
        if name in ("rows", "uniform") and value:
            lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, indent=1)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
