"""Scores by teacher forcing: what a model predicts at held-out positions, against the labels and the dense model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_wsvd.calibration.batches import IGNORED


CHUNK = 4096  # positions whose logits are held at a time, in fp32


@dataclass(frozen=True)
class Score:
    """A metric's value, and its standard error over questions or windows if there is one."""

    value: float
    standard_error: float | None = None


@dataclass(frozen=True)
class EvaluationBatch:
    """What the decoder takes (`input_ids [B, S]` or `inputs_embeds [B, S, E]`), and `labels [B, S]`.

    Tokens of label -100 are not counted. Padding stands on the right, where no counted position attends to it: a
    causal decoder needs no mask.
    """

    inputs: dict[str, Tensor]
    labels: Tensor

    @property
    def counted(self) -> Tensor:
        """bool `[B, S - 1]`: positions that predict a counted token."""
        return self.labels[:, 1:] != IGNORED


@dataclass
class SequenceSums:
    """Sums over each sequence's counted positions, fp64 `[sequences]` on the CPU.

    Attributes:
        tokens: how many positions.
        nll: negative log-likelihood of the labels, nats.
        kl: KL(dense || model), nats.
        right: positions where the label is the most likely token.
    """

    tokens: Tensor
    nll: Tensor
    kl: Tensor
    right: Tensor


@torch.no_grad()
def counted_states(model: PreTrainedModel, batch: EvaluationBatch) -> Tensor:
    """The decoder's last hidden states at a batch's N counted positions, `[N, E]`."""
    states = model.get_decoder()(**batch.inputs, use_cache=False).last_hidden_state
    return states[:, :-1][batch.counted]


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    batches: Sequence[EvaluationBatch],
    dense_states: list[Tensor],
    states_of: Callable[[PreTrainedModel, Any], Tensor] = counted_states,
) -> SequenceSums:
    """Compare `model` with the labels and with the dense model, of which `counted_states` are given.

    Logits are computed at counted positions alone; the output layer is the same in both models.

    Args:
        states_of: what gives the states of `model` in place of `counted_states`.
    """
    head = model.get_output_embeddings()
    sums = []
    for batch, dense in zip(batches, dense_states):
        states, labels = states_of(model, batch), batch.labels[:, 1:][batch.counted]
        columns = []
        for part in range(0, len(labels), CHUNK):
            piece = slice(part, part + CHUNK)
            log_q, log_p = (head(x[piece]).float().log_softmax(-1) for x in (states, dense))
            target = labels[piece]
            nll = F.nll_loss(log_q, target, reduction="none")
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            right = (log_q.argmax(-1) == target).float()
            columns.append(torch.stack([torch.ones_like(nll), nll, kl, right], 1))
        sequence = batch.counted.nonzero()[:, 0]
        total = torch.zeros(len(batch.labels), 4, dtype=torch.float64, device=labels.device)
        sums.append(total.index_add_(0, sequence, torch.cat(columns).double()).cpu())
    return SequenceSums(*torch.cat(sums).unbind(1))


def ratio_estimate(sums: Tensor, counts: Tensor) -> Score:
    """Mean a count `sum(sums) / sum(counts)`, and its standard error over the sequences `[N]`."""
    mean, number = sums.sum() / counts.sum(), len(sums)
    error = math.nan
    if number > 1:
        residual = (sums - mean * counts).square().sum() * number / (number - 1)
        error = float(residual.sqrt() / counts.sum())
    return Score(float(mean), error)


def share_right(right: Tensor) -> Score:
    """Share of true entries of bool `[N]`. Rule of succession inside the root: no false 0 at all right or none."""
    smoothed = (float(right.sum()) + 1) / (len(right) + 2)
    return Score(float(right.double().mean()), math.sqrt(smoothed * (1 - smoothed) / len(right)))
