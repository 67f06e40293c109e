"""What a model answers at every position, small enough to keep: its most likely tokens and all others together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .batches import Batch


TOP = 64  # tokens whose probability is kept apart; the others share one


@dataclass(frozen=True)
class Answered:
    """Model inputs, and the dense model's answers to them at N positions.

    Attributes:
        inputs: on the CPU, without labels.
        positions: bool `[B, S - 1]`: position t is one of the N if its prediction of token t + 1 counts.
        top: the most likely tokens, `[N, K]` int32, most likely first.
        log_probabilities: of these tokens and of all others together, `[N, K + 1]` fp32.
    """

    inputs: Batch
    positions: Tensor
    top: Tensor
    log_probabilities: Tensor

    @property
    def tokens(self) -> int:
        """Positions of the whole batch, padding included: what a forward costs."""
        return self.positions.shape[0] * (self.positions.shape[1] + 1)


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """Token ids that stand for an image, a video or a sound: what follows them is no text."""
    names = [f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index")]
    held = [getattr(model.config, name, None) for name in names]
    return sorted({number for number in held if isinstance(number, int)})


def most_likely(logits: Tensor) -> Tensor:
    """The `TOP` most likely tokens (all of a smaller vocabulary), most likely first. `[N, V]` to int64 `[N, K]`."""
    return logits.topk(min(TOP, logits.shape[-1])).indices


def log_probabilities_of(logits: Tensor, top: Tensor) -> Tensor:
    """Log-probabilities of the tokens `top` `[N, K]` and of all others together, fp32 `[N, K + 1]`; differentiable."""
    log_p = logits.float().log_softmax(-1)
    # From the others themselves: one minus the sum of the kept would be rounding error where they hold nearly all.
    others = log_p.scatter(1, top, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(1, top), others], dim=1)


def divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row, `[N]` in the inputs' dtype; 0 log 0 = 0, and rounding makes nothing negative."""
    return torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


def counted_positions(batch: Batch, placeholders: list[int]) -> Tensor:
    """bool `[B, S - 1]`: positions whose next token is attended text."""
    first = batch.get("input_ids", batch.get("inputs_embeds"))
    counted = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == counted.shape:
        counted = mask != 0
    following = counted[:, 1:] & counted[:, :-1]
    if "input_ids" in batch:
        for number in placeholders:
            following = following & (batch["input_ids"][:, 1:] != number)
    return following
