"""The fit: from statistics and a config to low-rank projections that stand in the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.statistics import Statistics, check_statistics_of
from ..modules import LatentProjection
from ..quantizer_config import WSVDConfig, allocated_by_gradient
from ..targets import Target, targets
from .allocation import allocate
from .distillation import distill
from .factorise import Spectrum, factorise
from .fisher import refine_alternating
from .methods import method_of


# Far above rounding to half precision, far below what another model's weights give.
SAME_WEIGHT = 0.02


@dataclass
class Fit:
    """What a fit came to.

    Attributes:
        targets: the compressed layers with their final ranks.
        info: JSON record: `method`, `rank_allocation`, `refinement`, `predicted_loss`, what the refinement measured.
        originals: (attention module, projection name, dense layer) of all that was exchanged.
    """

    targets: list[Target]
    info: dict[str, Any]
    originals: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    kept: bool = False

    @property
    def predicted_loss(self) -> float | None:
        """Second-order estimate of the loss that the ranks add, in nats for one sequence's answer; before refinement.

        None for methods without gradients.
        """
        return self.info["predicted_loss"]

    @property
    def k_rank(self) -> list[int | None]:
        """Rank of each decoder layer's K heads up to the last compressed layer, None for layers that are not."""
        return self.ranks("k")

    @property
    def v_rank(self) -> list[int | None]:
        """The same for V."""
        return self.ranks("v")

    def ranks(self, side: str, layers: int | None = None) -> list[int | None]:
        """Rank of every decoder layer's `side`."""
        by_layer = {target.attention.layer: getattr(target, f"{side}_rank") for target in self.targets}
        return [by_layer.get(layer) for layer in range(layers or max(by_layer) + 1)]

    def keep(self) -> None:
        """Let the low-rank projections stay in the model."""
        self.kept = True


@contextmanager
def fitted(model: PreTrainedModel, config: WSVDConfig, statistics: Statistics) -> Iterator[Fit]:
    """Low-rank projections stand in `model` inside; outside the dense ones, unless `Fit.keep` was called.

    Inside, the model is a plain model with low-rank weights: nothing is bound to a latent cache.

    Raises:
        ValueError: statistics of another model or dtype, or without what the method or the refinement needs; ranks
            that do not fit the model or its budget; a weight with NaN or infinity.
    """
    check_statistics_of(statistics, model)
    fit = Fit(*_planned(model, config, statistics))
    replacements = []
    for target, spectra in zip(fit.targets, fit.info.pop("spectra")):
        for side, rank, linear in target.sides():
            projection = _projection(target, side, rank, linear, spectra[side], config, statistics, fit.info)
            replacements.append((target.attention.module, f"{side}_proj", projection))
    try:
        for module, name, projection in replacements:
            fit.originals.append((module, name, getattr(module, name)))
            setattr(module, name, projection)
        if config.refinement == "distillation":
            before, after = distill(
                model,
                [projection for *_, projection in replacements],
                statistics.answered,
                steps=config.refinement_steps,
                learning_rate=config.refinement_learning_rate,
                seed=config.seed,
            )
            fit.info["held_out_kl"] = {"before": before, "after": after}
        yield fit
    finally:
        if not fit.kept:
            for module, name, linear in fit.originals:
                setattr(module, name, linear)


def check_statistics(target: Target, side: str, linear: nn.Module, statistics: Statistics) -> None:
    """Raise ValueError if the statistics were not measured on this dense projection."""
    attention, key = target.attention, (target.attention.layer, side)
    name = attention.side_name(side)
    other = "were they collected on another model?"
    gram, held = statistics.gram.get(key[0]), statistics.weight.get(key)
    if gram is None or held is None or gram.shape[0] != linear.in_features:
        found = "no such layer" if gram is None or held is None else f"{gram.shape[0]} inputs"
        raise ValueError(f"the statistics do not fit {name} ({linear.in_features} inputs): they hold {found}; {other}")
    heads = attention.heads_of(side)
    norms = linear.weight.detach().double().unflatten(0, (heads, -1)).square().sum(-1)
    if not bool(torch.isfinite(norms).all()):
        raise ValueError(f"{name}: the weight holds NaN or infinity and cannot be factorised")
    measured = held.diagonal(dim1=1, dim2=2).to(norms)
    if measured.shape != norms.shape or bool((norms - measured).norm() > SAME_WEIGHT * measured.norm()):
        raise ValueError(f"the statistics do not fit {name}: its weights are others; {other}")


def _planned(
    model: PreTrainedModel, config: WSVDConfig, statistics: Statistics
) -> tuple[list[Target], dict[str, Any]]:
    """Targets with their final ranks, and the record with the spectra of each target's sides."""
    chosen = targets(model, config)
    method = method_of(config.method, damping=config.damping, gradient_damping=config.gradient_damping)
    spectra: list[dict[str, Spectrum]] = []
    for target in logging.tqdm(chosen, desc="Spectra", unit="layer"):
        parts = {}
        for side, _, linear in target.sides():
            check_statistics(target, side, linear, statistics)
            try:
                parts[side] = method.spectrum((target.attention.layer, side), statistics, linear.weight)
            except ValueError as error:
                raise ValueError(f"{target.attention.side_name(side)}: {error}") from error
        spectra.append(parts)
    if method.uses_gradients:
        chosen = with_allocated_ranks(chosen, config, [{side: p.tails() for side, p in s.items()} for s in spectra])
    loss = None
    if method.uses_gradients:
        loss = sum(s[side].tails()[rank].item() for t, s in zip(chosen, spectra) for side, rank, _ in t.sides())
    info = {
        "method": config.method,
        "rank_allocation": config.rank_allocation,
        "refinement": config.refinement,
        "predicted_loss": loss,
        "spectra": spectra,
    }
    return chosen, info


def with_allocated_ranks(chosen: list[Target], config: WSVDConfig, tails: list[dict[str, Tensor]]) -> list[Target]:
    """Targets whose allocated sides have ranks of least predicted loss under the bytes that their ratio allows.

    Args:
        tails: of each target, predicted loss by rank of each side, `[head_dim + 1]`.
    """
    ranks: dict[tuple[int, str], int] = {}
    for name in ("rank_ratio", "k_rank_ratio", "v_rank_ratio"):
        pool = {
            (number, side): target.attention
            for number, target in enumerate(chosen)
            for side in target.allocated
            if allocated_by_gradient(config, side) == name
        }
        if not pool:
            continue
        dims = {attention.head_dim for attention in pool.values()}
        step = max(min(config.rank_multiple, min(dims) // 4), 1)
        budget = sum(attention.heads * attention.head_dim for attention in pool.values())
        try:
            ranks |= allocate(
                {key: tails[key[0]][key[1]] for key in pool},
                {key: attention.heads for key, attention in pool.items()},
                math.floor(getattr(config, name) * budget + 1e-6),
                step,
                config.rank_floor or step,
            )
        except ValueError as error:
            raise ValueError(
                f"WSVDConfig: {name}={getattr(config, name)} is too low to allocate: {error}; lower rank_multiple or "
                "rank_floor, or use rank_allocation='uniform'"
            ) from error
    return [
        replace(target, **{f"{side}_rank": ranks[number, side] for side in target.allocated})
        for number, target in enumerate(chosen)
    ]


def _projection(
    target: Target,
    side: str,
    rank: int,
    linear: nn.Module,
    parts: Spectrum,
    config: WSVDConfig,
    statistics: Statistics,
    info: dict[str, Any],
) -> LatentProjection:
    """The low-rank form of one projection."""
    name, key = target.attention.side_name(side), (target.attention.layer, side)
    try:
        down, up = factorise(linear.weight, rank, parts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if config.refinement == "fisher" and up is not None:
        fisher = statistics.fisher.get(key)
        if fisher is None:
            raise ValueError(
                'refinement="fisher" needs the element-wise Fisher information, and the statistics hold none: collect '
                "them with fisher=True"
            )
        refined = refine_alternating(linear.weight, fisher.to(linear.weight.device), down, up)
        down, up = refined.down, refined.up
        info.setdefault("fisher_loss", {})[name] = {"before": refined.losses[0], "after": refined.losses[-1]}
    return LatentProjection.from_linear(linear, down, up)
