"""Probability of the right answers, of all tokens or among candidates."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..calibration.batches import IGNORED
from .positions import Positions


class Candidates:
    """For each place of an answer (first token, second token, ...) the tokens that stand there in any answer.

    Raises ValueError if no place has two.
    """

    def __init__(self, positions: list[Positions]):
        found: dict[int, set[int]] = defaultdict(set)
        for batch in positions:
            for row in batch.answers.tolist():
                for place, token in enumerate(token for token in row if token != IGNORED):
                    found[place].add(token)
        if found and max(map(len, found.values())) < 2:
            raise ValueError(
                "answer='candidate_probability' needs different answers: the labels of all calibration data are equal"
            )
        self.tokens = {place: torch.tensor(sorted(tokens)) for place, tokens in found.items()}


def answer_log_probability(logits: Tensor, positions: Positions, candidates: Candidates | None = None) -> Tensor:
    """Logarithm of the probability of each row's answer: the sum over its tokens, each given those before it.

    Args:
        logits: `[B, S - 1, vocabulary]`, of the tokens that follow.
        candidates: among which tokens the probability is shared; None: the whole vocabulary.

    Returns:
        fp32 `[B]`, differentiable; 0 for a row without an answer.
    """
    answers = positions.answers.to(logits.device)
    chosen = answers != IGNORED
    rows, scores = chosen.nonzero()[:, 0], logits[chosen].float()
    own = scores.gather(1, answers[chosen][:, None])[:, 0]
    if candidates is None:
        log_p = own - scores.logsumexp(-1)
    else:
        places = (chosen.cumsum(1) - 1)[chosen]
        log_p = torch.empty_like(own)
        for place in places.unique().tolist():
            at = places == place
            shared = scores[at][:, candidates.tokens[place].to(scores.device)].logsumexp(-1)
            log_p = log_p.masked_scatter(at, own[at] - shared)
    return log_p.new_zeros(len(answers)).index_add(0, rows, log_p)
