"""What benchmarks/accuracy.py compares: methods, budgets, random rank plans, and how parts of a sweep are joined."""

from typing import Any

import torch
from torch import Tensor

from hf_wsvd import WSVDConfig


# A rank for every whole number: the best that a uniform plan can do with its bytes.
_UNIFORM = {"rank_allocation": "uniform", "rank_multiple": 1}
_ALLOCATED = {"rank_allocation": "gradient"}
METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "refinement": "none", **_UNIFORM},
    "asvd": {"method": "asvd", "refinement": "none", **_UNIFORM},
    "svd_llm": {"method": "svd_llm", "refinement": "none", **_UNIFORM},
    "wsvd-no-refine": {"method": "wsvd", "refinement": "none", **_UNIFORM},
    "wsvd": {"method": "wsvd", "refinement": "distillation", **_UNIFORM},
    "wsvd+allocation": {"method": "wsvd", "refinement": "distillation", **_ALLOCATED},
    "wsvd+allocation-no-refine": {"method": "wsvd", "refinement": "none", **_ALLOCATED},
    "svd_llm+refine": {"method": "svd_llm", "refinement": "distillation", **_UNIFORM},
    "wsvd-fisher": {"method": "wsvd", "refinement": "fisher", **_UNIFORM},
}
RATIOS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
PLAN_STEP = 8  # ranks of random plans are multiples of it

Plan = tuple[list[int], list[int]]  # rank of K and of V, by layer


def configuration(method: str, ratio: float, refinement_steps: int | None = None) -> WSVDConfig:
    """The fit behind a row of the table."""
    fields = {"rank_ratio": ratio, **METHODS[method]}
    if refinement_steps is not None and fields["refinement"] != "none":
        fields["refinement_steps"] = refinement_steps
    return WSVDConfig(**fields)


def kv_share(k_rank: list[int], v_rank: list[int], head_dim: int, ratio: float = 1.0) -> float:
    """Share of the dense cache that latents of these ranks take; ValueError if above `ratio`."""
    total, whole = sum(k_rank) + sum(v_rank), (len(k_rank) + len(v_rank)) * head_dim
    if total > ratio * whole + 1e-6:
        raise ValueError(f"ranks of {total} in all are more than {ratio} of {whole}")
    return total / whole


def random_plans(
    count: int, layers: int, head_dim: int, generator: torch.Generator, ratio: float | None = None
) -> list[Plan]:
    """Rank plans to compare prediction and measurement on, unlike in how they divide ranks.

    Each draws how far ranks scatter, how far K differs from V and early layers from late ones, and then every rank, a
    multiple of `PLAN_STEP`. Totals differ too; with `ratio` all plans have one total, the largest within the ratio.
    """
    plans = []
    for _ in range(count):
        spread = 2 * torch.rand((), generator=generator)
        tilt, slope = torch.randn(2, generator=generator)
        score = spread * torch.randn(2, layers, generator=generator)
        score += tilt * torch.tensor([[1.0], [-1.0]]) + slope * torch.linspace(-1, 1, layers)
        if ratio is None:
            ranks = _ranks(score + 4 * torch.rand((), generator=generator) - 1.5, head_dim)
        else:
            ranks = _with_total(score, head_dim, int(ratio * 2 * layers * head_dim), generator)
        plans.append((ranks[0].tolist(), ranks[1].tolist()))
    return plans


def _ranks(score: Tensor, head_dim: int) -> Tensor:
    """Scores `[2, layers]`, where 0 stands for half a head, as ranks."""
    return (head_dim * score.sigmoid() / PLAN_STEP).round().clamp(1, head_dim // PLAN_STEP).long() * PLAN_STEP


def _with_total(score: Tensor, head_dim: int, total: int, generator: torch.Generator) -> Tensor:
    """Ranks by `score` whose sum is the largest multiple of `PLAN_STEP` up to `total`."""
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _ranks(score + middle, head_dim).sum() <= total else (low, middle)
    ranks = _ranks(score + low, head_dim)
    while ranks.sum() + PLAN_STEP <= total:
        free = (ranks + PLAN_STEP <= head_dim).nonzero()
        side, layer = free[torch.randint(len(free), (), generator=generator)].tolist()
        ranks[side, layer] += PLAN_STEP
    return ranks


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation of two samples of one length; equal values share their mean rank."""
    centred = []
    for values in (first, second):
        x = torch.tensor(values, dtype=torch.float64)
        below, equal = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
        ranks = below.double() + (equal - 1).double() / 2
        centred.append(ranks - ranks.mean())
    return float((centred[0] @ centred[1]) / (centred[0].norm() * centred[1].norm()))


def merge_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One result out of those of several processes, which measured other seeds, ratios or methods of one model.

    `environment` and `command` are those of the first part, `commands` holds all.

    Raises:
        ValueError: parts of different models or settings, or a row measured twice.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("model", "settings"):
            if part[name] != first[name]:
                raise ValueError(f"the parts differ in {name}: {first[name]} and {part[name]}")
    rows = [row for part in parts for row in part["rows"]]
    keys = [(row["method"], row["kv_ratio"], row["seed"], row["metric"]) for row in rows]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"measured twice: {twice}")
    order = {name: number for number, name in enumerate(METHODS)}
    by_method = [(order[row["method"]], -row["kv_ratio"], row["seed"], row["metric"], row) for row in rows]
    merged = {
        "command": first["command"],
        "commands": [part["command"] for part in parts],
        "environment": first["environment"],
        "model": first["model"],
        "settings": first["settings"],
        "seconds": [entry for part in parts for entry in part["seconds"]],
        "configurations": [entry for part in parts for entry in part["configurations"]],
        "rows": [entry[-1] for entry in sorted(by_method, key=lambda entry: entry[:-1])],
    }
    for name in ("prediction", "generation_check"):
        found = [part[name] for part in parts if name in part]
        if found:
            merged[name] = found[0]
    return merged
