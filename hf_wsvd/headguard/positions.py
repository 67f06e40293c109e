"""What every token of a calibration batch is: padding, image, text, prompt or answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.answers import counted_positions, placeholder_ids
from ..calibration.batches import IGNORED, Batch
from ..image_tokens import visual_token_ids


@dataclass(frozen=True)
class Positions:
    """Token classes of one batch of B rows and S tokens, on one device.

    Attributes:
        batch: with `input_ids`, and `labels` and `evidence_mask` where they are known.
        visual: token ids of images and videos.
        placeholders: these, and those of sounds.
    """

    batch: Batch
    visual: tuple[int, ...]
    placeholders: list[int]

    @cached_property
    def attended(self) -> Tensor:
        """bool `[B, S]`: no padding."""
        ids, mask = self.batch["input_ids"], self.batch.get("attention_mask")
        return mask != 0 if mask is not None and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)

    @cached_property
    def image(self) -> Tensor:
        """bool `[B, S]`: tokens of images and videos."""
        return self.attended & _among(self.batch["input_ids"], self.visual)

    @cached_property
    def text(self) -> Tensor:
        """bool `[B, S]`: tokens that stand for themselves."""
        return self.attended & ~_among(self.batch["input_ids"], self.placeholders)

    @cached_property
    def answers(self) -> Tensor:
        """int64 `[B, S - 1]`: the answer token that each position should predict, -100 where there is none."""
        ids, labels = self.batch["input_ids"], self.batch.get("labels")
        if labels is None:
            return torch.full_like(ids[:, 1:], IGNORED, dtype=torch.int64)
        # The first token of a row with padding on its left is predicted from padding.
        return labels[:, 1:].masked_fill(~(self.attended[:, 1:] & self.attended[:, :-1]), IGNORED)

    @cached_property
    def answer_queries(self) -> Tensor:
        """bool `[B, S]`: positions that predict a token of the answer."""
        return torch.cat([self.answers != IGNORED, torch.zeros_like(self.attended[:, :1])], dim=1)

    def text_targets(self, which: str) -> Tensor:
        """bool `[B, S - 1]`: positions whose next token counts for the text loss: the "prompt"'s text, or "all".

        A row whose labels cover all its text (a window of running text) has no prompt apart from an answer: then all
        of it counts.
        """
        counted = counted_positions(self.batch, self.placeholders)
        if which == "all":
            return counted
        prompt = counted & (self.answers == IGNORED)
        return torch.where(prompt.any(1, keepdim=True), prompt, counted)

    @property
    def evidence(self) -> Tensor:
        """bool `[B, S]`: image tokens that show what the answer names."""
        return self.image & self.batch["evidence_mask"].bool()


def positions_of(batch: Batch, model: PreTrainedModel) -> Positions:
    """The classes of a batch's tokens, on the batch's device. ValueError without `input_ids`."""
    if "input_ids" not in batch:
        raise ValueError("calibration data need a column input_ids to choose heads: inputs_embeds do not tell images")
    return Positions(batch, visual_token_ids(model), placeholder_ids(model))


def _among(ids: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(numbers, dtype=ids.dtype, device=ids.device))
