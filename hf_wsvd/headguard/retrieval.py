"""Selector "retrieval": how often a head looks first at what the answer names, like SparseMM (arXiv 2506.05344)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizer_config import HeadGuardConfig
from .combination import physical, sample_mean
from .measuring import measured, require
from .observer import AttentionCall
from .positions import Positions
from .scoring import HeadScores, ScoringTask


HITS = "evidence_hits"  # name in `ScoringTask.raw`


def retrieval(task: ScoringTask) -> HeadScores:
    """Hits on the evidence, of query heads averaged to KV heads.

    A hit: the key that a query which predicts an answer token attends to most is a token of `evidence_mask`. It is
    worth 1 / (tokens of evidence in the row). The answer is the labels', not the model's own as in the paper, and
    query heads are averaged where the paper sums.

    Leaves in `task.raw` `evidence_hits`, the sum over a sample's answer, fp32 `[samples, layers, query heads]`, NaN
    for rows without an answer or evidence.

    Raises:
        ValueError: no `evidence_mask` in a batch, one of another form, or no row with an answer and evidence.
    """
    for number, batch in enumerate(task.batches):
        mask = batch.get("evidence_mask")
        if mask is None:
            raise ValueError(
                f"selector='retrieval' needs a column evidence_mask in all calibration data; batch {number} has "
                f"{sorted(batch)}: a bool tensor [batch, sequence] of the image tokens that show what the answer names"
            )
        if mask.shape != batch["input_ids"].shape:
            raise ValueError(
                f"Column evidence_mask of calibration batch {number} must have shape "
                f"{list(batch['input_ids'].shape)}; found {list(mask.shape)}"
            )
    require(task, images=True, answers=True)
    task.raw[HITS] = measured(task, _hits)
    if bool(task.raw[HITS].isnan().all()):
        raise ValueError("calibration data hold no row with both an answer (labels) and evidence (evidence_mask)")
    return combined(task.raw, task.num_key_value_heads, task.config)


def combined(raw: dict[str, Tensor], num_key_value_heads: list[int], config: HeadGuardConfig) -> HeadScores:
    """Scores from the samples' hits."""
    scores = physical(sample_mean(raw[HITS]), num_key_value_heads)
    return HeadScores(scores, scores)


def _hits(call: AttentionCall, positions: Positions) -> Tensor:
    """`[B, query heads]`: hits on a row's evidence over the number of its tokens."""
    device = call.query.device
    evidence, queries = positions.evidence.to(device), positions.answer_queries.to(device)
    size = evidence.sum(1)
    hits = torch.zeros(call.query.shape[:2], device=device)
    for row in (queries.any(1) & (size > 0)).nonzero()[:, 0].tolist():
        first = most_attended(call, row, queries[row].nonzero()[:, 0])
        hits[row] = evidence[row][first].sum(1) / size[row]
    return hits.masked_fill(~(queries.any(1) & (size > 0))[:, None], float("nan"))


def most_attended(call: AttentionCall, row: int, queries: Tensor) -> Tensor:
    """The key that each of a few queries of one row attends to most, int64 `[query heads, queries]`."""
    query, key = call.query[row][:, queries], call.key[row]
    key = key.repeat_interleave(len(query) // len(key), dim=0)
    scores = (query @ key.mT).float()  # neither a positive factor nor a softcap changes which is the largest
    if call.mask is None:
        keys = torch.arange(key.shape[1], device=key.device)
        scores = scores.masked_fill(keys > queries[:, None], float("-inf"))
    else:
        mask = call.mask[min(row, len(call.mask) - 1)][..., queries, : key.shape[1]]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))
    return scores.argmax(-1)
