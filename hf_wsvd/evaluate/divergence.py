"""How far a compressed model's next-token distributions are from the dense model's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.chat import place


Positions = Literal["answer", "all"]


@dataclass(frozen=True)
class Divergence:
    """Means over `tokens` predicted positions."""

    kl: float  # KL(dense || compressed), nats a token
    agreement: float  # share of positions with the same most likely token
    tokens: int


def divergence(
    dense: PreTrainedModel,
    compressed: PreTrainedModel,
    batches: Iterable[Mapping[str, torch.Tensor]],
    positions: Positions = "all",
    chunk: int = 1024,
) -> Divergence:
    """Mean KL(dense || compressed) and top-1 agreement of two models with one vocabulary.

    Each batch is one forward of the whole sequence in either model, no cache. Position `t` predicts token `t + 1`;
    counted are those whose next token is attended ("all"), or is an answer token by `labels` (not -100, "answer").

    Args:
        chunk: positions compared at a time, in fp32.
    Raises:
        ValueError: another `positions`, "answer" without `labels`, or no position to compare.
    """
    if positions not in ("answer", "all"):
        raise ValueError(f"positions must be 'answer' or 'all', got {positions!r}")
    total = agreeing = 0.0
    tokens = 0
    for batch in logging.tqdm(batches, desc="Comparing", unit="batch"):
        counted = counted_positions(batch, positions)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        p_all, q_all = (next_logits(model, inputs)[counted] for model in (dense, compressed))
        for p, q in zip(p_all.split(chunk), q_all.split(chunk)):
            log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            # 0 log 0 = 0: a logit of -inf in both models would give NaN
            terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
            total += terms.sum(dtype=torch.float64).item()
            agreeing += (p.argmax(-1) == q.argmax(-1)).sum().item()
        tokens += int(counted.sum())
    if tokens == 0:
        raise ValueError("No position to compare: the batches are empty or hold one token a sequence")
    return Divergence(kl=total / tokens, agreement=agreeing / tokens, tokens=tokens)


def counted_positions(batch: Mapping[str, torch.Tensor], positions: Positions) -> torch.Tensor:
    """bool `[B, S - 1]`: which predictions count, see `divergence`."""
    if positions == "answer":
        if "labels" not in batch:
            raise ValueError(f"positions='answer' needs a column labels; columns found: {', '.join(batch)}")
        return batch["labels"][:, 1:] != -100
    mask = batch.get("attention_mask")
    mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
    return (mask[:, 1:] != 0) & (mask[:, :-1] != 0)


def next_logits(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[B, S - 1, vocabulary]` of tokens 1 to S - 1, on the CPU or wherever the model leaves them."""
    with torch.no_grad():
        return model(**place(inputs, model), use_cache=False).logits[:, :-1]
