"""Tiny models with weights of low precision, rounded to nearest, built once a session."""

from __future__ import annotations

import copy
from functools import cache

import tiny_models
from transformers import PreTrainedModel

import hf_wsvd
from hf_wsvd import LowPrecisionConfig, WSVDConfig


W8A8 = {"weight_bits": 8, "activation_bits": 8}
W8A4 = {"weight_bits": 8, "activation_bits": 4}
W8A16 = {"weight_bits": 8, "activation_bits": 16}
W4A16 = {"weight_bits": 4, "activation_bits": 16, "group_size": 16}
W4A8 = {"weight_bits": 4, "activation_bits": 8}
FORMATS = {"W8A8": W8A8, "W8A4": W8A4, "W8A16": W8A16, "W4A16": W4A16, "W4A8": W4A8}


def quantized(
    family: str = "llama", rank_ratio: float | None = 0.5, form: str = "W8A8", self_check: str = "none"
) -> PreTrainedModel:
    """A model of its own, which a test may change."""
    return copy.deepcopy(_quantized(family, rank_ratio, form, self_check))


@cache
def _quantized(family: str, rank_ratio: float | None, form: str, self_check: str) -> PreTrainedModel:
    config = WSVDConfig(
        rank_ratio=rank_ratio,
        **tiny_models.CLOSED_FORM,
        self_check=self_check,
        low_precision=LowPrecisionConfig(method="rtn", **FORMATS[form]),
    )
    data = None if rank_ratio is None else tiny_models.calibration_batches(family)
    return hf_wsvd.compress(tiny_models.build(family), config, calibration=data)
