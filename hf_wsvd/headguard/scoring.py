"""What selectors are given and what they give: a score for each physical KV head, of its keys and of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.batches import Batch
from ..decoder import DecoderAttention, decoder_attentions, key_value_heads
from ..quantizer_config import CacheConfig, HeadGuardConfig


class HeadScores(NamedTuple):
    """Scores of all physical heads, the larger the more a head needs guarding.

    Attributes:
        key, value: fp32 `[layers, heads]`, as many heads as the layer with the most; -inf where a layer has no such
            head. Selectors that do not tell keys from values give one tensor twice.
    """

    key: Tensor
    value: Tensor


@dataclass
class ScoringTask:
    """One choice of heads.

    Attributes:
        model: in evaluation mode, dense or compressed and bound; it is left as it was.
        batches: model inputs with `labels` and perhaps `evidence_mask` (bool `[B, S]`, image tokens that show what the
            answer names); checked, on the CPU.
        config: what is asked for.
        cache: the packed storage that heads are guarded from.
        raw: measures of each sample by name, `[samples, layers, heads]`, which a selector may leave to be saved.
    """

    model: PreTrainedModel
    batches: list[Batch]
    config: HeadGuardConfig
    cache: CacheConfig
    raw: dict[str, Tensor] = field(default_factory=dict)

    @property
    def attentions(self) -> list[DecoderAttention]:
        """Layers with keys and values of their own."""
        return decoder_attentions(self.model)

    @property
    def num_key_value_heads(self) -> list[int]:
        """Physical heads of every decoder layer, as `GuardMap` has them."""
        return key_value_heads(self.model)

    def scores_of(self, by_layer: dict[int, Tensor]) -> Tensor:
        """One tensor of the form of `HeadScores` out of fp32 `[heads]` by decoder layer."""
        counts = self.num_key_value_heads
        scores = torch.full((len(counts), max(counts)), float("-inf"))
        for layer, values in by_layer.items():
            scores[layer, : len(values)] = values.float().cpu()
        return scores


Selector = Callable[[ScoringTask], HeadScores]
