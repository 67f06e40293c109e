"""Selector "restoration": how much of the loss that a packed cache causes would be gone if a head were guarded.

HeadGuard's sensitivities do not know what the quantizer does to a head. Here the path from the exact cache to the
packed one is walked, all heads at once, and the divergence of the answers that comes about on the way is charged to
the heads: integrated gradients (Sundararajan et al. 2017, arXiv 1703.01365) along x(s) = exact + s (stored - exact).
The shares of all heads add up to the divergence at the end. As heads depend on each other, they are chosen in rounds:
the best few are taken, and the path is walked anew with those guarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor
from transformers.utils import logging

from ..calibration.answers import divergences, log_probabilities_of, most_likely
from ..calibration.batches import IGNORED, Batch
from ..calibration.cached_run import part_of
from ..calibration.chat import place
from ..calibration.grouping import group_tokens, groups_of, joined
from ..calibration.modes import FP16_LOSS_SCALE
from ..compat import CACHE_ARGUMENT
from ..image_tokens import ImageTokens
from ..quantizer_config.guard_map import SIDES
from .measuring import inputs_of, require, undisturbed_run
from .positions import Positions, positions_of
from .scoring import HeadScores, ScoringTask
from .sensitivity import check_gradients
from .stored_heads import StoredPrompt, Weights, storages_of


ROUNDS = (0.125, 0.25, 0.5, 1.0)  # shares of the heads to guard that are chosen after each walk
STEPS = 4  # of a walk: midpoints, as gradients at the exact end are zero
# Of the keys and values of a group, which are held a few times over. On an accelerator large groups are fast: only
# what follows the image is differentiated.
GROUP_BYTES = 2**30


def restoration(task: ScoringTask) -> HeadScores:
    """What guarding a head saves of KL(exact || packed) at the answers, in nats a position of the calibration set.

    The prompt up to its last image stands in the cache, and all that follows reads it as stored, as it does where
    an image is asked about once it is cached. Where guards are for all tokens, that is the prompt before its answer
    (half of a text without a prompt). Heads that earlier rounds chose have larger scores than all others: the order of
    the scores is the order of choice, for every smaller fraction too. Without labels, all text counts as the answer.

    Raises:
        ValueError: no tokens of images where guards are for these, a cache that packs nothing, nothing that follows
            the images, gradients that are not finite, weights that are offloaded, inference mode, or a model with
            linear attention.
    """
    check_gradients(task)
    require(task, images=task.config.tokens == "image")
    walk = Walk(task)
    counts = task.num_key_value_heads
    wanted = max(round(task.config.fraction * sum(counts)), 1)
    chosen = torch.zeros(len(counts), max(counts), dtype=torch.bool)
    rounds: list[tuple[Tensor, Tensor]] = []  # heads chosen in a round, and all heads' scores in it
    values = None
    with undisturbed_run(task.model):
        for share in ROUNDS:
            count = max(round(share * wanted), 1) - int(chosen.sum())
            if count <= 0:
                continue
            saved = walk.saved(chosen, task.config.protect)
            values = saved["value"] if values is None else values
            scores = saved["key"] + saved["value"] if task.config.protect == "kv" else saved["key"]
            new = torch.zeros_like(chosen)
            best = scores.masked_fill(chosen, float("-inf")).flatten().argsort(descending=True, stable=True)
            new.view(-1)[best[:count]] = True
            rounds.append((new, scores))
            chosen = chosen | new
    key = in_order_of_choice(rounds)
    return HeadScores(key, key if task.config.protect == "kv" else values)


def in_order_of_choice(rounds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Scores of the last round for heads that no round chose; those chosen lie above all that were chosen later.

    Args:
        rounds: bool `[layers, heads]`, the heads chosen in a round, and the scores of all heads in it.
    """
    result = rounds[-1][1].clone()
    chosen = torch.stack([new for new, _ in rounds]).any(0)
    floor = result.masked_fill(chosen, float("-inf")).max().clamp_min(0)
    for new, scores in reversed(rounds):
        result[new] = floor + scores[new].clamp_min(0)
        floor = result[new].max()
    return result


class Walk:
    """Gradients of the answers' divergence on the way from the exact to the packed cache.

    Raises:
        ValueError: as `restoration`.
    """

    def __init__(self, task: ScoringTask):
        self.task = task
        self.storages = storages_of(task)
        self.groups = list(groups_with_splits(task))
        self.exact: list[tuple[Tensor, Tensor]] = []  # by group, of the answers: top tokens and log-probabilities
        self.scale = FP16_LOSS_SCALE if task.model.dtype == torch.float16 else 1.0

    def saved(self, guarded: Tensor, protect: str) -> dict[str, Tensor]:
        """By side, what guarding each head saves, fp32 `[layers, heads]` (-inf where there is no head).

        Args:
            guarded: bool `[layers, heads]`: heads whose keys (and values, with `protect` "kv") are guarded already.
        """
        total = {side: {a.layer: torch.zeros(a.heads) for a in self.task.attentions} for side in SIDES}
        count = 0
        for number, (members, split) in enumerate(logging.tqdm(self.groups, desc="Scoring heads", unit="batch")):
            step = Step(self, joined(members), split)
            if len(self.exact) == number:
                self.exact.append(step.exact_answers())
            count += len(self.exact[number][0])
            for index in range(STEPS):
                share = (index + 0.5) / STEPS
                weights = self.weights(share, guarded, protect)
                step.divergence(share, weights, self.exact[number])
                for side, by_layer in weights.items():
                    for layer, weight in by_layer.items():
                        total[side][layer] += weight.grad.float().cpu() / (STEPS * self.scale)
        if any(not bool(torch.isfinite(x).all()) for by_layer in total.values() for x in by_layer.values()):
            raise ValueError(
                f"the gradients of {type(self.task.model).__name__}'s heads are not finite (NaN or infinity) on the "
                "calibration data; load the model in bfloat16 or float32"
            )
        if count == 0:
            raise ValueError(
                f"selector={self.task.config.selector!r} needs answers, or text, after the images of calibration data"
            )
        return {
            side: self.task.scores_of({layer: gradients / count for layer, gradients in by_layer.items()})
            for side, by_layer in total.items()
        }

    def weights(self, share: float, guarded: Tensor, protect: str) -> Weights:
        """How far each head has gone from guarded to packed; leaves that take gradients."""
        weights: Weights = {side: {} for side in SIDES}
        for attention in self.task.attentions:
            for side in SIDES:
                weight = torch.full((attention.heads,), share)
                if side == "key" or protect == "kv":
                    weight[guarded[attention.layer, : attention.heads]] = 0
                weights[side][attention.layer] = weight.to(attention.module.k_proj.weight.device).requires_grad_()
        return weights


class Step:
    """One group on the way: its first `split` tokens in a cache, the others to come.

    Attributes:
        counted: bool `[B, S - split]`: positions after the split whose next token counts.
    """

    def __init__(self, walk: Walk, batch: Batch, split: int):
        self.walk, self.model = walk, walk.task.model
        positions = positions_of(place(batch, self.model), self.model)
        inputs = inputs_of(positions.batch)
        length = inputs["input_ids"].shape[1]
        image = positions.image[:, :split]
        classes = ImageTokens(image if walk.task.config.tokens == "image" else torch.ones_like(image))
        self.prompt = StoredPrompt(walk.task, part_of(inputs, 0, split), classes, walk.storages)
        self.rest = part_of(inputs, split, length)
        counted = answers_or_text(positions)
        self.counted = torch.nn.functional.pad(counted[:, split:], (0, 1))

    @torch.no_grad()
    def exact_answers(self) -> tuple[Tensor, Tensor]:
        """The most likely tokens at the counted positions and their log-probabilities, over the exact prompt."""
        rows = self._counted_logits(self.prompt.between(0.0, self.walk.weights(0.0, self._nobody(), "kv")))
        top = torch.cat([most_likely(part) for part in rows.split(512)]) if len(rows) else rows.long()
        kept = [log_probabilities_of(a, b) for a, b in zip(rows.split(512), top.split(512))] if len(rows) else [rows]
        return top, torch.cat(kept)

    def divergence(self, share: float, weights: Weights, exact: tuple[Tensor, Tensor]) -> float:
        """KL to the exact answers, summed over positions, in nats; its gradients are added to those of `weights`."""
        top, log_p = exact
        with torch.enable_grad():
            rows = self._counted_logits(self.prompt.between(share, weights))
            loss = divergences(log_p, log_probabilities_of(rows, top)).sum() if len(rows) else rows.sum()
            try:
                (self.walk.scale * loss).backward()
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
                raise ValueError(
                    f"selector={self.walk.task.config.selector!r} cannot differentiate through the cache of "
                    f"{type(self.model).__name__}, some of whose layers (linear attention) write their state in "
                    "place; choose another selector"
                ) from error
        return float(loss.detach())

    def _counted_logits(self, cache: object) -> Tensor:
        logits = self.model(**self.rest, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
        return logits[self.counted.to(logits.device)]

    def _nobody(self) -> Tensor:
        counts = self.walk.task.num_key_value_heads
        return torch.zeros(len(counts), max(counts), dtype=torch.bool)


def groups_with_splits(task: ScoringTask) -> Iterator[tuple[list[Batch], int]]:
    """Batches that run as one, and the number of their tokens that stand in the cache.

    Batches that end with what is cached say nothing and are left out.
    """
    limit = group_tokens(task.model.device)
    if task.model.device.type != "cpu":
        widths = sum(2 * attention.heads * attention.head_dim for attention in task.attentions)
        limit = max(limit, GROUP_BYTES // (widths * task.model.dtype.itemsize))
    for split, members in groupby(task.batches, key=lambda batch: split_of(positions_of(batch, task.model), task)):
        rest = [batch for batch in members if batch["input_ids"].shape[1] > split]
        for group in groups_of(rest, limit):
            yield group, split


def split_of(positions: Positions, task: ScoringTask) -> int:
    """Tokens of a batch, perhaps all, that are cached before the others come: up to the last image or the answer."""
    length = positions.image.shape[1]
    if task.config.tokens == "image":
        columns = positions.image.any(0).nonzero()[:, 0]
        split = int(columns[-1]) + 1 if len(columns) else length  # text alone tells nothing of images
    else:
        predicting = answers_or_text(positions).any(0).nonzero()[:, 0]
        first = int(predicting[0]) if len(predicting) else 0
        # No tokens of an image may be left for later: they go in with the pixels.
        image = positions.image.any(0).nonzero()[:, 0]
        split = max(first if first > 0 else length // 2, int(image[-1]) + 1 if len(image) else 1)
    return split


def answers_or_text(positions: Positions) -> Tensor:
    """bool `[B, S - 1]`: positions that predict an answer; any text in a batch without labels."""
    answers = positions.answers != IGNORED
    return answers if bool(answers.any()) else positions.text_targets("all")
