"""How far a compressed model's next-token distributions are from the dense model's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.batches import BESIDE_INPUTS
from ..calibration.chat import place


Positions = Literal["answer", "all"]


@dataclass(frozen=True)
class Divergence:
    """Means over `tokens` predicted positions."""

    kl: float  # KL(dense || compressed), nats a token
    agreement: float  # share of positions with the same most likely token
    tokens: int


def divergence(
    dense: PreTrainedModel | list[torch.Tensor],
    compressed: PreTrainedModel,
    batches: Iterable[Mapping[str, torch.Tensor]],
    positions: Positions = "all",
    chunk: int = 1024,
) -> Divergence:
    """Mean KL(dense || compressed) and top-1 agreement of two models with one vocabulary.

    Each batch is one forward of the whole sequence in either model, no cache. Position `t` predicts token `t + 1`;
    counted are those whose next token is attended ("all"), or is an answer token by `labels` (not -100, "answer").

    Args:
        dense: the model, or its `counted_logits` of each batch, to compare several models with one.
        chunk: positions compared at a time, in fp32.
    Raises:
        ValueError: another `positions`, "answer" without `labels`, or no position to compare.
    """
    total = agreeing = 0.0
    tokens = 0
    for number, batch in enumerate(logging.tqdm(batches, desc="Comparing", unit="batch")):
        p_all = dense[number] if isinstance(dense, list) else counted_logits(dense, batch, positions)
        q_all = counted_logits(compressed, batch, positions).to(p_all.device)
        for p, q in zip(p_all.split(chunk), q_all.split(chunk), strict=True):
            log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            # 0 log 0 = 0: a logit of -inf in both models would give NaN
            terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
            total += terms.sum(dtype=torch.float64).item()
            agreeing += (p.argmax(-1) == q.argmax(-1)).sum().item()
        tokens += len(p_all)
    if tokens == 0:
        raise ValueError("No position to compare: the batches are empty or hold one token a sequence")
    return Divergence(kl=total / tokens, agreement=agreeing / tokens, tokens=tokens)


def counted_logits(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], positions: Positions = "all"
) -> torch.Tensor:
    """Logits `[N, vocabulary]` of a batch's N counted positions, see `divergence`."""
    counted = counted_positions(batch, positions)
    inputs = place({name: value for name, value in batch.items() if name not in BESIDE_INPUTS}, model)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1]
    return logits[counted.to(logits.device)]


def counted_positions(batch: Mapping[str, torch.Tensor], positions: Positions) -> torch.Tensor:
    """bool `[B, S - 1]`: which predictions count, see `divergence`."""
    if positions not in ("answer", "all"):
        raise ValueError(f"positions must be 'answer' or 'all', got {positions!r}")
    if positions == "answer":
        if "labels" not in batch:
            raise ValueError(f"positions='answer' needs a column labels; columns found: {', '.join(batch)}")
        return batch["labels"][:, 1:] != -100
    mask = batch.get("attention_mask")
    mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
    return (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
