"""What a fit decides before it needs a weight: final ranks, from statistics alone; then one projection at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.statistics import Side, Statistics, check_statistics_of
from ..modules import LatentProjection
from ..quantizer_config import WSVDConfig, allocated_by_gradient
from ..targets import Target, targets
from .allocation import allocate
from .factorise import Spectrum, factorise, spread
from .fisher import refine_alternating
from .methods import Method, method_of


# Far above rounding to half precision, far below what another model's weights give.
SAME_WEIGHT = 0.02


@dataclass
class Plan:
    """A fit before its first weight.

    Attributes:
        targets: the layers to compress with their final ranks.
        info: JSON record: `method`, `rank_allocation`, `refinement`, `predicted_loss`; `projection` adds to it.
        spectra: what planning computed already, until a projection takes it.
    """

    targets: list[Target]
    info: dict[str, Any]
    config: WSVDConfig
    statistics: Statistics
    method: Method
    spectra: dict[Side, Spectrum]

    def projection(self, target: Target, side: str, rank: int, linear: nn.Module) -> LatentProjection:
        """The low-rank form of the dense projection `linear`, on its device and in its dtype.

        Raises:
            ValueError: the statistics were measured on other weights, or a weight is NaN or infinity.
        """
        name, key = target.attention.side_name(side), (target.attention.layer, side)
        check_weight(name, linear.weight, self.statistics, key)
        try:
            parts = self.spectra.pop(key, None)
            if parts is None:
                parts = self.method.spectrum(key, self.statistics, linear.weight)
            down, up = factorise(linear.weight, rank, parts)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if self.config.refinement == "fisher" and up is not None:
            refined = refine_alternating(linear.weight, self.statistics.fisher[key].to(linear.weight.device), down, up)
            down, up = refined.down, refined.up
            losses = {"before": refined.losses[0], "after": refined.losses[-1]}
            self.info.setdefault("fisher_loss", {})[name] = losses
        # Distillation has the last word on the factors, and rotates them itself.
        if up is not None and rotates(self.config, side) and self.config.refinement != "distillation":
            down, up = spread(down, up)
        return LatentProjection.from_linear(linear, down, up)


def rotates(config: WSVDConfig, side: str) -> bool:
    """Whether the fit ends with a rotation of this side's latents. Those of queries are not cached."""
    return config.latent_rotation != "none" and side != "q"


def planned(model: PreTrainedModel, config: WSVDConfig, statistics: Statistics) -> Plan:
    """Layers and final ranks by statistics alone; the model may be without weights (on the meta device).

    Raises:
        ValueError: statistics of another architecture or dtype, or without what the method or the refinement needs;
            ranks that do not fit the model or its budget.
    """
    check_statistics_of(statistics, model)
    chosen = targets(model, config)
    method = method_of(config.method, damping=config.damping, gradient_damping=config.gradient_damping)
    for target in chosen:
        for side, _, linear in target.sides():
            check_statistics(target, side, linear, statistics, method)
    spectra: dict[Side, Spectrum] = {}
    loss = None
    if method.uses_gradients:
        tails: list[dict[str, Tensor]] = []
        for target in logging.tqdm(chosen, desc="Spectra", unit="layer"):
            for side, *_ in target.sides():
                key = (target.attention.layer, side)
                spectra[key] = method.spectrum(key, statistics)
            tails.append({side: spectra[target.attention.layer, side].tails() for side, *_ in target.sides()})
        chosen = with_allocated_ranks(chosen, config, tails)
        loss = sum(part[side][rank].item() for target, part in zip(chosen, tails) for side, rank, _ in target.sides())
    check_refinement(chosen, config, statistics)
    info = {
        "method": config.method,
        "rank_allocation": config.rank_allocation,
        "refinement": config.refinement,
        "predicted_loss": loss,
    }
    return Plan(chosen, info, config, statistics, method, spectra)


def check_statistics(target: Target, side: str, linear: nn.Module, statistics: Statistics, method: Method) -> None:
    """Raise ValueError if the statistics are of another architecture or lack what the method needs."""
    attention, key = target.attention, (target.attention.layer, side)
    name = attention.side_name(side)
    gram, held = statistics.gram.get(key[0]), statistics.weight.get(key)
    shape = (attention.heads_of(side), attention.head_dim, attention.head_dim)
    if gram is None or held is None or gram.shape[0] != linear.in_features or held.shape != shape:
        found = "no such layer"
        if gram is not None and held is not None:
            found = f"{gram.shape[0]} inputs and {held.shape[0]} heads of {held.shape[1]}"
        raise ValueError(
            f"the statistics do not fit {name} ({linear.in_features} inputs, {shape[0]} heads of {shape[1]}): they "
            f"hold {found}; were they collected on another model?"
        )
    if method.uses_gradients and key not in statistics.gradient:
        raise ValueError(f"the statistics hold no gradients of {name}, which this method needs: collect them anew")


def check_weight(name: str, weight: Tensor, statistics: Statistics, key: Side) -> None:
    """Raise ValueError if the statistics were measured on other weights than the dense `weight`.

    Compared are each output's norm, and its energy on the calibration inputs.
    """
    dense = weight.detach().float()
    energy = ((dense @ statistics.gram[key[0]].to(dense)) * dense).sum(-1)
    for found, held in ((dense.square().sum(-1), statistics.weight[key]), (energy, statistics.output[key])):
        measured = held.diagonal(dim1=1, dim2=2).flatten()
        found = found.to(measured)
        if bool((found - measured).norm() > SAME_WEIGHT * measured.norm()):
            raise ValueError(
                f"the statistics do not fit {name}: its weights are others; were they collected on another model?"
            )


def check_refinement(chosen: list[Target], config: WSVDConfig, statistics: Statistics) -> None:
    """Raise ValueError if the statistics lack what the refinement needs."""
    cut = [(t.attention.layer, side) for t in chosen for side, rank, _ in t.sides() if rank < t.attention.head_dim]
    if config.refinement == "distillation" and cut and not statistics.answered:
        raise ValueError(
            'refinement="distillation" needs the dense model\'s answers, and the statistics hold none: collect them '
            'with keep_answers=True, or choose refinement="none"'
        )
    if config.refinement == "fisher" and any(key not in statistics.fisher for key in cut):
        raise ValueError(
            'refinement="fisher" needs the element-wise Fisher information, and the statistics hold none: collect '
            "them with fisher=True, or `hf-wsvd calibrate --fisher`"
        )


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
        ratio, total = getattr(config, name), sum(attention.heads for attention in pool.values())
        budget = math.floor(ratio * sum(a.heads * a.head_dim for a in pool.values()) + 1e-6)
        if config.rank_floor is None:  # a low ratio needs finer steps
            while step > 1 and step * total > budget:
                step = max(step // 2, 1)
        floor = step * math.ceil((config.rank_floor or step) / step)
        try:
            ranks |= allocate(
                {key: tails[key[0]][key[1]] for key in pool},
                {key: attention.heads for key, attention in pool.items()},
                budget,
                step,
                floor,
            )
        except ValueError as error:
            raise ValueError(
                f"WSVDConfig: {name}={ratio} is too low to allocate: {error}; lower rank_floor, or use "
                "rank_allocation='uniform'"
            ) from error
    return [
        replace(target, **{f"{side}_rank": ranks[number, side] for side in target.allocated})
        for number, target in enumerate(chosen)
    ]
