"""Perplexity of a text under a language model, with a sliding window."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.chat import place


@dataclass(frozen=True)
class Perplexity:
    """Mean over `tokens` predicted tokens."""

    nats_per_token: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nats_per_token)


def perplexity(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    window: int = 1024,
    stride: int = 512,
    max_tokens: int | None = None,
) -> Perplexity:
    """Perplexity of the first `max_tokens` tokens of `text`.

    Windows of `window` tokens move by `stride`; a token is scored once, in the first window that holds it, so all but
    those of the first window have at least `window - stride` tokens before them. The first token is not scored.

    Raises ValueError for a text of less than two tokens or a stride that is not from 1 to `window - 1`.
    """
    if not 1 <= stride < window:
        raise ValueError(f"stride must be at least 1 and below window, got {stride} and {window}")
    # verbose=False: the text is longer than the model's context on purpose
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
    if len(tokens) < 2:
        raise ValueError(f"The text has {len(tokens)} tokens; at least 2 are needed")
    start = tokenizer("")["input_ids"]
    start = start if start == [tokenizer.bos_token_id] else []  # [] for tokenizers that add nothing
    total, scored = 0.0, 1
    ends = [*range(min(window, len(tokens)), len(tokens), stride), len(tokens)]
    for end in logging.tqdm(ends, desc="Perplexity", unit="window"):
        ids = torch.tensor([start + tokens[max(end - window, 0) : end]])
        total += negative_log_likelihood(model, ids, last=end - scored)
        scored = end
    return Perplexity(nats_per_token=total / (len(tokens) - 1), tokens=len(tokens) - 1)


def negative_log_likelihood(model: PreTrainedModel, ids: torch.Tensor, last: int) -> float:
    """Summed negative log-likelihood, nats, of the `last` tokens of `ids` `[1, S]`, in fp32."""
    inputs = place({"input_ids": ids}, model)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0, -last - 1 : -1]
    return F.cross_entropy(logits.float(), inputs["input_ids"][0, -last:].to(logits.device), reduction="sum").item()
