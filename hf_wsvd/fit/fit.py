"""The fit: from statistics and a config to low-rank projections that stand in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration.statistics import Side, Statistics
from ..quantizer_config import WSVDConfig
from ..targets import Target
from .distillation import distill
from .plan import planned, rotates


@dataclass
class Fit:
    """What a fit came to.

    Attributes:
        targets: the compressed layers with their final ranks.
        info: JSON record: `method`, `rank_allocation`, `refinement`, `predicted_loss`, what the refinement measured.
        originals: (attention module, projection name, dense layer) of all that was exchanged.
        dense_rows: where those are gone, by layer and side the dense weights `[heads, head_dim, in]` of the heads
            that are to keep their full rank.
    """

    targets: list[Target]
    info: dict[str, Any]
    originals: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    dense_rows: dict[Side, Tensor] = field(default_factory=dict)
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

    def dense_heads(self, target: Target, side: str, heads: list[int]) -> Tensor:
        """Dense weights `[len(heads), head_dim, in]` of heads of a projection that was exchanged."""
        attention = target.attention
        for module, name, linear in self.originals:
            if module is attention.module and name == f"{side}_proj":
                return linear.weight.detach().unflatten(0, (attention.heads, attention.head_dim))[heads]
        return self.dense_rows[attention.layer, side]

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
    plan = planned(model, config, statistics)
    fit = Fit(plan.targets, plan.info)
    replacements = [
        (target.attention.module, f"{side}_proj", plan.projection(target, side, rank, linear))
        for target in plan.targets
        for side, rank, linear in target.sides()
    ]
    try:
        for module, name, projection in replacements:
            fit.originals.append((module, name, getattr(module, name)))
            setattr(module, name, projection)
        refine(model, config, statistics, fit)
        yield fit
    finally:
        if not fit.kept:
            for module, name, linear in fit.originals:
                setattr(module, name, linear)


def refine(model: PreTrainedModel, config: WSVDConfig, statistics: Statistics, fit: Fit) -> None:
    """What happens to the factors once all of them stand in the model; `fit.info` records it."""
    if config.refinement != "distillation":
        return
    sides = [(side, projection) for target in fit.targets for side, _, projection in target.sides()]
    fit.info["refinement_kl"] = distill(
        model,
        [projection for _, projection in sides],
        statistics.answered,
        steps=config.refinement_steps,
        learning_rate=config.refinement_learning_rate,
        seed=config.seed,
        rotated=[projection for side, projection in sides if rotates(config, side)],
    )
