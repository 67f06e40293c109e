"""Selector "restoration": how much of the loss that a packed cache causes would be gone if a head were guarded.

HeadGuard's sensitivities do not know what the quantizer does to a head. Here the path from the exact cache to the
packed one is walked, all heads at once, and the divergence of the answers that comes about on the way is charged to
the heads: integrated gradients (Sundararajan et al. 2017, arXiv 1703.01365) along x(s) = exact + s (stored - exact).
The shares of all heads add up to the divergence at the end. As heads depend on each other, they are chosen in rounds:
the best few are taken, and the path is walked anew with those guarded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.answers import divergences, log_probabilities_of, most_likely
from ..calibration.batches import IGNORED
from ..calibration.collector import logits_of
from ..calibration.modes import FP16_LOSS_SCALE
from ..image_tokens import ImageTokens
from ..quantizer_config.guard_map import SIDES
from .measuring import grouped, inputs_of, require, undisturbed_run
from .observer import AttentionCall, observed
from .positions import Positions, positions_of
from .scoring import HeadScores, ScoringTask
from .sensitivity import check_gradients, gradients
from .stored_heads import StoredHeads


ROUNDS = (0.125, 0.25, 0.5, 1.0)  # shares of the heads to guard that are chosen after each walk
STEPS = 4  # of a walk: midpoints, as gradients at the exact end are zero


def restoration(task: ScoringTask) -> HeadScores:
    """What guarding a head saves of KL(exact || packed) at the answers, in nats a position of the calibration set.

    Queries after the last image of a row read its image as stored (all queries, where guards are for all tokens), as
    tokens do that come when the image is in the cache already. Heads that earlier rounds chose have larger scores than
    all others, so that the order of the scores is the order of choice, for every smaller fraction too. Without labels,
    all text counts as the answer.

    Raises:
        ValueError: no tokens of images where guards are for these, a cache that packs nothing, gradients that are not
            finite, weights that are offloaded, or inference mode.
    """
    check_gradients(task)
    require(task, images=task.config.tokens == "image")
    walk = Walk(task, StoredHeads(task))
    counts = task.num_key_value_heads
    wanted = max(round(task.config.fraction * sum(counts)), 1)
    chosen = torch.zeros(len(counts), max(counts), dtype=torch.bool)
    rounds: list[tuple[Tensor, Tensor]] = []  # heads chosen in a round, and all heads' scores in it
    values = None
    with undisturbed_run(task.model), gradients(task), torch.enable_grad():
        for share in ROUNDS:
            count = max(round(share * wanted), 1) - int(chosen.sum())
            if count <= 0:
                continue
            saved = walk.saved(chosen, task.config.protect)
            values = saved["value"] if values is None else values
            scores = saved["key"] + saved["value"] if task.config.protect == "kv" else saved["key"]
            open_scores = scores.masked_fill(chosen, float("-inf"))
            new = torch.zeros_like(chosen)
            new.view(-1)[open_scores.view(-1).argsort(descending=True, stable=True)[:count]] = True
            rounds.append((new, scores))
            chosen = chosen | new
    key = in_order_of_choice(rounds)
    return HeadScores(key, key if task.config.protect == "kv" else values)


def in_order_of_choice(rounds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Scores of the last round for heads that no round chose; those chosen lie above all that were chosen later."""
    result = rounds[-1][1].clone()
    floor = result.masked_fill(torch.stack([new for new, _ in rounds]).any(0), float("-inf")).max().clamp_min(0)
    for new, scores in reversed(rounds):
        result[new] = floor + scores[new].clamp_min(0)
        floor = result[new].max()
    return result


@dataclass
class Walk:
    """Gradients of the answers' divergence on the way from the exact to the packed cache."""

    task: ScoringTask
    stored: StoredHeads

    def __post_init__(self) -> None:
        self.exact: list[
            tuple[Tensor, Tensor]
        ] = []  # by batch, of the answers: top tokens and their log-probabilities
        self.scale = FP16_LOSS_SCALE if self.task.model.dtype == torch.float16 else 1.0

    def saved(self, guarded: Tensor, protect: str) -> dict[str, Tensor]:
        """By side, what guarding each head saves, fp32 `[layers, heads]` (-inf where there is no head).

        Args:
            guarded: bool `[layers, heads]`: heads whose keys (and values, with `protect` "kv") are guarded already.
        """
        total = {side: {a.layer: torch.zeros(a.heads) for a in self.task.attentions} for side in SIDES}
        positions = 0
        for number, batch in enumerate(grouped(self.task)):
            step = Step(self, positions_of(batch, self.task.model), guarded, protect)
            if len(self.exact) == number:
                self.exact.append(step.exact_answers())
            positions += len(self.exact[number][0])
            for index in range(STEPS):
                for side, by_layer in step.gradients((index + 0.5) / STEPS, self.exact[number]).items():
                    for layer, gradient in by_layer.items():
                        total[side][layer] += gradient / STEPS
        if any(not bool(torch.isfinite(x).all()) for by_layer in total.values() for x in by_layer.values()):
            raise ValueError(
                f"the gradients of {type(self.task.model).__name__}'s heads are not finite (NaN or infinity) on the "
                "calibration data; load the model in bfloat16 or float32"
            )
        return {
            side: self.task.scores_of({layer: x / max(positions, 1) for layer, x in by_layer.items()})
            for side, by_layer in total.items()
        }


class Step:
    """One batch on the way."""

    def __init__(self, walk: Walk, positions: Positions, guarded: Tensor, protect: str):
        self.walk, self.positions, self.guarded = walk, positions, guarded
        self.sides = SIDES if protect == "kv" else ("key",)
        by_image = walk.task.config.tokens == "image"
        image = positions.image
        self.classes = ImageTokens(image)
        # Text after the last image; rows without one read nothing that is stored otherwise.
        after = (image.flip(1).cumsum(1).flip(1) == 0) & image.any(1, keepdim=True)
        self.readers = after if by_image else torch.ones_like(image)
        # Positions whose next token counts.
        answers = positions.answers != IGNORED
        counted = torch.where(answers.any(), answers, positions.text_targets("all"))
        self.counted = counted & self.readers[:, :-1]
        self.share = 0.0
        self.weights: dict[str, dict[int, Tensor]] = {}
        self.held: dict[int, dict[str, tuple[Tensor | None, Tensor]]] = {}

    @torch.no_grad()
    def exact_answers(self) -> tuple[Tensor, Tensor]:
        """The most likely tokens at the counted positions and their log-probabilities, without packing."""
        rows = self._counted_logits()
        top = torch.cat([most_likely(part) for part in rows.split(512)]) if len(rows) else rows.long()
        kept = [log_probabilities_of(a, b) for a, b in zip(rows.split(512), top.split(512))] if len(rows) else [rows]
        return top, torch.cat(kept)

    def gradients(self, share: float, exact: tuple[Tensor, Tensor]) -> dict[str, dict[int, Tensor]]:
        """By side and layer, `[heads]` fp32 on the CPU: the divergence's gradient along each head's way."""
        top, log_p = exact
        if len(top) == 0:
            return {}
        self.share, self.held = share, {}
        self.weights = {side: {} for side in SIDES}
        for attention in self.walk.task.attentions:
            for side in SIDES:
                weight = torch.full((attention.heads,), share)
                if side in self.sides:
                    weight[self.guarded[attention.layer, : attention.heads]] = 0
                device = attention.module.k_proj.weight.device
                self.weights[side][attention.layer] = weight.to(device).requires_grad_()
        with self.walk.stored.watching(), observed(self.walk.task.model, self._see):
            rows = self._counted_logits()
            loss = divergences(log_p, log_probabilities_of(rows, top)).sum()
            (self.walk.scale * loss).backward()
        self.held = {}
        return {
            side: {
                layer: w.grad.float().cpu() / self.walk.scale for layer, w in by_layer.items() if w.grad is not None
            }
            for side, by_layer in self.weights.items()
        }

    def _counted_logits(self) -> Tensor:
        logits = logits_of(self.walk.task.model, inputs_of(self.positions.batch))[:, :-1]
        return logits[self.counted.to(logits.device)]

    def _see(self, call: AttentionCall) -> Tensor:
        if call.layer not in self.held:  # a layer that is recomputed in the backward pass finds them here
            self.held[call.layer] = self.walk.stored.differences(call, self.classes)
        mixed = []
        for side, exact in zip(SIDES, (call.key, call.value)):
            guarding, rest = self.held[call.layer][side]
            weight = self.weights[side][call.layer].to(exact.dtype)[None, :, None, None]
            mixed.append(exact + weight * rest if guarding is None else exact + self.share * guarding + weight * rest)
        readers = self.readers.to(call.output.device)[:, :, None, None]
        return torch.where(readers, call.function(*mixed), call.output)
