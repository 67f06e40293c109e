"""Small calibration sets with images, answers and evidence, and the same rows padded into one batch."""

from __future__ import annotations

import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor


Batch = dict[str, Tensor]

IMAGE = slice(2, 6)  # the image tokens of `tiny_models.prompt`
LENGTHS = (12, 15, 9)  # of the rows below
ANSWER = 3  # tokens


def row(family: str, tokens: int = 12, seed: int = 1, answer: int = ANSWER) -> Batch:
    """One prompt whose last tokens are the answer, and for models with images two tokens of evidence."""
    batch = tiny_models.prompt(family, batch=1, tokens=tokens, seed=seed)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, tokens - answer :] = batch["input_ids"][:, tokens - answer :]
    batch["labels"] = labels
    if "pixel_values" in batch:
        batch["evidence_mask"] = torch.zeros_like(labels, dtype=torch.bool)
        batch["evidence_mask"][:, 3:5] = True
    return batch


def rows(family: str) -> list[Batch]:
    """Rows of different lengths with different answers."""
    return [row(family, tokens, seed) for seed, tokens in enumerate(LENGTHS, 1)]


def padded(members: list[Batch], side: str) -> Batch:
    """One batch of several rows, padded on the "left" or the "right"."""
    length = max(member["input_ids"].shape[1] for member in members)
    along = ("input_ids", "attention_mask", "labels", "evidence_mask", "mm_token_type_ids")

    def stretched(name: str, value: Tensor) -> Tensor:
        missing = length - value.shape[1]
        return F.pad(value, (missing, 0) if side == "left" else (0, missing), value=-100 if name == "labels" else 0)

    return {
        name: torch.cat([stretched(name, m[name]) if name in along else m[name] for m in members])
        for name in members[0]
    }
