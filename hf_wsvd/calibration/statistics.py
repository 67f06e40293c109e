"""What calibration measured of a dense model: all that a fit needs, whatever its method, ranks and refinement."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..decoder import decoder_shape
from .answers import Answered
from .dense_side import DenseSample


Side = tuple[int, str]  # decoder layer number and projection: "q", "k" or "v"

SIDES = ("q", "k", "v")


@dataclass
class Statistics:
    """Second moments of a dense model over a calibration set. All tensors are on the CPU.

    Those of a file (`load_statistics`) are read when they are looked up.

    Attributes:
        gram: decoder layer to `E[x x^T]` over tokens of its projections' input, `[in_features, in_features]` fp64.
        output: projection to `E[y y^T]` of each head's output without its bias, `[heads, head_dim, head_dim]` fp64.
        weight: projection to `W_h W_h^T` of each head's dense weight, `[heads, head_dim, head_dim]` fp64.
        gradient: projection to the second moment of the loss's gradient by each head's output, summed over a
            sequence's tokens and averaged over sequences that all weigh the same, `[heads, head_dim, head_dim]` fp64.
            The loss is the answer's negative log-likelihood in nats.
        fisher: projection to the mean over sequences of the squared gradient by each weight,
            `[heads * head_dim, in_features]` fp32 (WSVD's `F`); empty unless it was asked for.
        answered: the calibration inputs with the dense model's answers: what the factors are refined on.
        samples: a few small model inputs out of the data with the dense model's answers. The checkpoint's self-check
            stores them; empty the list to keep private data out.
        probe: the dense model's answers to arbitrary tokens, which the self-check takes where `samples` is empty;
            None if the model cannot be run on them.
        info: `samples`, `tokens` and `sha256` of the data, and what is known of their source.
        decoder_shape: of the model (`hf_wsvd.decoder.decoder_shape`); empty if unknown.
        dtype: of the model, such as "bfloat16"; empty if unknown.
    """

    gram: Mapping[int, Tensor] = field(default_factory=dict)
    output: Mapping[Side, Tensor] = field(default_factory=dict)
    weight: Mapping[Side, Tensor] = field(default_factory=dict)
    gradient: Mapping[Side, Tensor] = field(default_factory=dict)
    fisher: Mapping[Side, Tensor] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)
    samples: list[DenseSample] = field(default_factory=list)
    probe: DenseSample | None = None
    info: dict[str, Any] = field(default_factory=dict)
    decoder_shape: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""


def dtype_name(model: PreTrainedModel) -> str:
    """The model's dtype as it is recorded: "float32", "bfloat16" ..."""
    return str(model.dtype).removeprefix("torch.")


def check_statistics_of(statistics: Statistics, model: PreTrainedModel) -> None:
    """Raise ValueError if `statistics` were measured on a model of another shape or dtype than `model`.

    Whether its weights are the same is seen when they are fitted. Statistics made by hand, without a shape or dtype,
    pass.
    """
    check_same_model(statistics.decoder_shape, statistics.dtype, model)
    vocabulary = model.get_input_embeddings().num_embeddings
    inputs = [held.inputs for held in (*statistics.samples, *statistics.answered)]
    largest = max((int(batch["input_ids"].max()) for batch in inputs if "input_ids" in batch), default=0)
    # What a head gives may be more tokens than are embedded.
    head = getattr(model.get_output_embeddings(), "out_features", None) or vocabulary
    answer = max((int(group.top.max()) for group in statistics.answered if group.top.numel()), default=0)
    if largest >= vocabulary or answer >= head:
        raise ValueError(
            f"the statistics were measured on another model: they hold the token ids {largest} and {answer}, this "
            f"model takes {vocabulary} and answers {head}"
        )


def check_same_model(shape: Mapping[str, Any], dtype: str, model: PreTrainedModel) -> None:
    """Raise ValueError if a recorded decoder shape or dtype is not the model's."""
    present = decoder_shape(model) if shape else {}
    # The same decoder may stand in the causal model or in its base, whose configurations name different types.
    different = [name for name, value in present.items() if name != "model_type" and shape.get(name) != value]
    if different:
        text = ", ".join(f"{name}={shape.get(name)} (this model: {present[name]})" for name in different)
        raise ValueError(f"the statistics were measured on another model ({shape.get('model_type')}): {text}")
    if dtype and dtype != dtype_name(model):
        raise ValueError(
            f"the statistics were measured in {dtype}, the model is {dtype_name(model)}: calibrate again, or load the "
            f"model with dtype={dtype!r}"
        )


def is_statistics(calibration: Any) -> bool:
    """Whether a `calibration` argument is statistics or names their file; if not, it is data to calibrate on."""
    return isinstance(calibration, Statistics | str | os.PathLike)


def given_statistics(calibration: Any) -> Statistics | None:
    """The statistics that a `calibration` argument is or names; None for data to calibrate on.

    Raises ValueError if it names no file, or as `load_statistics`.
    """
    if not is_statistics(calibration):
        return None
    if isinstance(calibration, Statistics):
        return calibration
    if not os.path.exists(calibration):
        raise ValueError(
            f"calibration={str(calibration)!r} does not exist: a {type(calibration).__name__} must be a file of "
            "statistics; data are model-input dicts, see load_calibration"
        )
    from .statistics_file import load_statistics  # which needs this module

    return load_statistics(calibration)
