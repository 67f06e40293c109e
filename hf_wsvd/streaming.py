"""Compression while a dense checkpoint loads: each weight becomes factors before the next one is read.

Ranks depend on statistics alone, which were measured before, so they are settled while the model has no weights yet.
The projections stay ordinary linear layers, whose names and shapes transformers finds in the checkpoint, until their
weight arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps

from .calibration import Statistics
from .calibration.statistics import Side
from .fit import Fit, full_rank_heads, planned, refine
from .quantizer_config import WSVDConfig
from .self_check import recorded_dense_side, warn_of_no_self_check
from .surgery import settle
from .targets import Target


class Streaming:
    """One load of a dense checkpoint.

    Args:
        model: without weights, on the meta device.

    Raises:
        ValueError: as `planned`.
    """

    def __init__(self, model: PreTrainedModel, config: WSVDConfig, statistics: Statistics):
        self.config, self.statistics = config, statistics
        self.guard_map = config.guard_map if config.keeps_full_rank else None
        if config.keeps_full_rank and self.guard_map is None:
            raise ValueError(
                "WSVDConfig: head_guard.rank='full' needs a guard_map where a checkpoint is compressed as it loads, "
                "for no dense weight is left when heads are chosen: give one, or data in place of statistics"
            )
        self.dense_rows: dict[Side, Tensor] = {}
        self.plan = planned(model, config, statistics)
        # Parameters that are still dense.
        self.dense: dict[str, tuple[Target, str, int]] = {
            f"{target.attention.side_name(side)}.weight": (target, side, rank)
            for target in self.plan.targets
            for side, rank, _ in target.sides()
        }

    def share(self, name: str) -> float:
        """Bytes that stay of a parameter, over those of the dense one."""
        if name not in self.dense:
            return 1.0
        target, side, rank = self.dense[name]
        head_dim, inputs = target.attention.head_dim, getattr(target.attention.module, f"{side}_proj").in_features
        return 1.0 if rank == head_dim else rank * (inputs + head_dim) / (inputs * head_dim)

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> dict[str, nn.Parameter]:
        """Put low-rank factors into the model in place of the dense projection whose weight this is.

        Args:
            weight: `[heads * head_dim, in_features]` on the device and in the dtype that the factors are to have.

        Returns:
            The factors by parameter name. A bias stays as it is, loaded or not yet.

        Raises:
            ValueError: as `Plan.projection`.
        """
        target, side, rank = self.dense[name]
        layer = target.attention.layer
        linear = getattr(target.attention.module, f"{side}_proj")
        if weight.shape != linear.weight.shape:
            raise ValueError(f"{name} is {list(weight.shape)} in the checkpoint, not {list(linear.weight.shape)}")
        linear.weight = nn.Parameter(weight)
        heads = [] if self.guard_map is None or side == "q" else full_rank_heads(self.guard_map, side, layer)
        if heads:
            self.dense_rows[layer, side] = weight.unflatten(0, (target.attention.heads, -1))[heads]
        projection = self.plan.projection(target, side, rank, linear)
        setattr(target.attention.module, f"{side}_proj", projection)
        del self.dense[name]
        prefix = name.removesuffix("weight")
        return {f"{prefix}{kind}": factor for kind, factor in projection.named_parameters() if kind != "bias"}

    def finish(self, model: PreTrainedModel) -> None:
        """Refine, bind and record, once all weights are there.

        Raises:
            ValueError: as `take`, or a weight that did not arrive.
        """
        # A weight that transformers makes out of others (a fused projection) may pass the operation by.
        for name in list(self.dense):
            weight = model.get_parameter(name)
            if weight.is_meta:
                raise ValueError(f"{name} was not loaded")
            self.take(name, weight.data)
        fit = Fit(self.plan.targets, self.plan.info, dense_rows=self.dense_rows)
        refine(model, self.config, self.statistics, fit)
        dense = None
        if self.config.self_check != "none":
            dense = recorded_dense_side(self.statistics, self.config.self_check)
        if dense is None and self.config.self_check != "none":
            warn_of_no_self_check(model, "the statistics hold no answers of the dense model")
        settle(model, self.config, fit, dense, self.statistics)


class Factorise(ConversionOps):
    """The loading operation that turns dense weights into factors."""

    def __init__(self, streaming: Streaming):
        self.streaming = streaming

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        result = {}
        try:
            for name in list(input_dict):
                value = input_dict.pop(name)  # the dense weight shall have no owner left
                if name in self.streaming.dense:
                    result |= self.streaming.take(name, value[0] if isinstance(value, list) else value)
                else:
                    result[name] = value
        except ValueError as error:
            return Refusal(error)
        return result


class Refusal(dict):
    """Stands for the tensors of an operation and raises when they are asked for.

    transformers catches what an operation raises, reads on to the end of the checkpoint and then tells of "some
    issues". What its loop over the result raises ends the load at once.
    """

    def __init__(self, error: ValueError):
        super().__init__()
        self.error = error

    def items(self) -> NoReturn:
        raise self.error


def refuse_offload(devices: Iterable[Any]) -> None:
    """Raise ValueError if a device map with these devices leaves weights on the CPU or on disk between forwards."""
    names = {str(device) for device in devices}
    if "disk" in names or ("cpu" in names and len(names) > 1):
        raise ValueError(
            "device_map offloads weights, and a dense checkpoint cannot be compressed that way: compress it with a "
            "device_map that fits, save it, and load the compressed checkpoint with offloading"
        )
