"""Image and output sensitivity of every head: HeadGuard's scores (arXiv 2609.35800), without attention maps.

Two gates, both 1, stand on the output o of every query head: one on the whole of it, one on the part that comes from
the image, `o_img = sum over image keys of a v`. The gradient with respect to a gate is the inner product of the
gradient at o with what the gate multiplies, so that no gate has to be put in. And o_img is linear in the values: a
second attention call over values of zero off the image gives it. Masking the other keys would change the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calibration.batches import IGNORED, Batch
from ..calibration.collector import logits_of
from ..calibration.modes import FP16_LOSS_SCALE, recomputed
from ..quantizer_config import HeadGuardConfig
from .answer_probability import Candidates, answer_log_probability
from .combination import physical, sensitivity_of, standardised
from .measuring import grouped, inputs_of, require, stacked, undisturbed_run
from .observer import AttentionCall, observed
from .positions import Positions, positions_of
from .scoring import HeadScores, ScoringTask


IMAGE, OUTPUT, ANSWER = "image_gradient", "output_gradient", "answer_log_probability"  # names in `ScoringTask.raw`
GATES = {"headguard": (IMAGE, OUTPUT), "image_only": (IMAGE,), "output_only": (OUTPUT,)}


def sensitivity(task: ScoringTask) -> HeadScores:
    """Selectors "headguard", "image_only" and "output_only", see `HeadGuardConfig`.

    Leaves in `task.raw` for each sample, fp32: `image_gradient` (of the logarithm of the answer's probability, NaN for
    rows without an image or an answer) and `output_gradient` (of the text loss) `[samples, layers, query heads]`, and
    `answer_log_probability` `[samples, 1, 1]`.

    Raises:
        ValueError: no labels, no tokens of images, no text, one answer alone with "candidate_probability", gradients
            that are not finite, weights that are offloaded, or inference mode.
    """
    task.raw.update(measure_gradients(task, GATES[task.config.selector]))
    return combined(task.raw, task.num_key_value_heads, task.config)


def combined(raw: dict[str, Tensor], num_key_value_heads: list[int], config: HeadGuardConfig) -> HeadScores:
    """Scores from the samples' gradients, by the options of `config`: z-scores of the sensitivities, summed."""
    total = None
    for gate in GATES[config.selector]:
        gradients = raw[gate].double()
        if gate == IMAGE and config.answer != "log_probability":
            gradients = gradients * raw[ANSWER].double().exp()  # dp = p d(log p)
        if gate == OUTPUT and config.sensitivity == "signed":
            gradients = -gradients  # a head that is needed lowers the loss
        scores = physical(sensitivity_of(gradients, config.sensitivity), num_key_value_heads)
        scores = standardised(scores, config.normalization)
        total = scores if total is None else total + scores
    return HeadScores(total, total)


def measure_gradients(task: ScoringTask, gates: tuple[str, ...]) -> dict[str, Tensor]:
    """What `sensitivity` leaves in `task.raw`, for `gates` alone: one forward of every batch, one backward a gate."""
    check_gradients(task)
    if IMAGE in gates:
        require(task, images=True, answers=True)
    if OUTPUT in gates:
        require_text(task)
    candidates = None
    if IMAGE in gates and task.config.answer == "candidate_probability":
        candidates = Candidates([positions_of(batch, task.model) for batch in task.batches])
    parts: dict[str, list[Tensor]] = {}
    with undisturbed_run(task.model), gradients(task), torch.enable_grad():
        for batch in grouped(task):
            for name, value in _Gradients(task, gates, candidates).of(batch).items():
                parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def require_text(task: ScoringTask) -> None:
    """Raise ValueError unless some row of the data has text to predict."""
    held = (positions_of(batch, task.model) for batch in task.batches)
    if not any(bool(positions.text_targets(task.config.text_loss).any()) for positions in held):
        raise ValueError(
            f"selector={task.config.selector!r} needs text: no row of the calibration data has two tokens of it in a "
            "row (attention_mask 0 is no text)"
        )


class _Gradients:
    """The passes of one batch and what they show."""

    def __init__(self, task: ScoringTask, gates: tuple[str, ...], candidates: Candidates | None):
        self.task, self.gates, self.candidates = task, gates, candidates
        self.scale = FP16_LOSS_SCALE if task.model.dtype == torch.float16 else 1.0
        self.gate: str | None = None  # whose backward pass runs
        self.found: dict[str, dict[int, Tensor]] = {gate: {} for gate in gates}
        self.positions: Positions

    def of(self, batch: Batch) -> dict[str, Tensor]:
        self.positions = positions_of(batch, self.task.model)
        with observed(self.task.model, self._see):
            logits = logits_of(self.task.model, inputs_of(batch))[:, :-1]
            raw = {}
            for gate in self.gates:
                targets, log_probability = self._objective(gate, logits)
                self.gate = gate
                (self.scale * targets.sum()).backward(retain_graph=gate != self.gates[-1])
                raw[gate] = self._finite(gate)
                if log_probability is not None:
                    raw[ANSWER] = log_probability.detach().float().cpu()[:, None, None]
        return raw

    def _objective(self, gate: str, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """What to differentiate, `[B]`, and the answers' log-probabilities where that is what it is."""
        if gate == IMAGE:
            value = answer_log_probability(logits, self.positions, self.candidates)
            return value, value
        targets = self.positions.text_targets(self.task.config.text_loss).to(logits.device)
        following = self.positions.batch["input_ids"][:, 1:].to(logits.device)
        losses = F.cross_entropy(logits[targets].float(), following[targets].long(), reduction="none")
        rows = targets.nonzero()[:, 0]
        return losses.new_zeros(len(targets)).index_add(0, rows, losses) / targets.sum(1).clamp_min(1), None

    def _see(self, call: AttentionCall) -> None:
        if self.gate is not None:  # a layer that is recomputed in a backward pass
            return
        image = None
        if IMAGE in self.gates:
            keys = self.positions.image.to(call.value.device)[:, None, :, None]
            image = call.attend(call.value.detach().masked_fill(~keys, 0))
        call.output.register_hook(partial(self._see_gradient, call.layer, call.output.detach(), image))

    def _see_gradient(self, layer: int, output: Tensor, image: Tensor | None, gradient: Tensor) -> None:
        gated, queries = (image, self._image_queries()) if self.gate == IMAGE else (output, self.positions.attended)
        exact = torch.promote_types(gradient.dtype, torch.float32)
        inner = (gradient.to(exact) * gated.to(exact)).sum(-1) / self.scale
        self.found[self.gate][layer] = inner.masked_fill(~queries.to(inner.device)[:, :, None], 0).sum(1)

    def _image_queries(self) -> Tensor:
        positions = self.positions
        return {"all": positions.attended, "text": positions.text, "answer": positions.answer_queries}[
            self.task.config.image_queries
        ]

    def _finite(self, gate: str) -> Tensor:
        """`[B, layers, query heads]`, NaN in rows that do not count for the gate."""
        value = stacked(self.task, self.found[gate])
        if any(not bool(torch.isfinite(part).all()) for part in self.found[gate].values()):
            raise ValueError(
                f"the gradients of {type(self.task.model).__name__}'s heads are not finite (NaN or infinity) on the "
                "calibration data; load the model in bfloat16 or float32"
            )
        if gate == IMAGE:
            counted = self.positions.image.any(1) & (self.positions.answers != IGNORED).any(1)
        else:
            counted = self.positions.text_targets(self.task.config.text_loss).any(1)
        return value.masked_fill(~counted.cpu()[:, None, None], float("nan"))


@contextmanager
def gradients(task: ScoringTask) -> Iterator[None]:
    """Activations take gradients inside, and layers keep their input alone for the backward passes."""
    with ExitStack() as stack:
        stack.enter_context(recomputed(task.model, task.attentions))
        stack.callback(task.model.get_input_embeddings().register_forward_hook(_require_gradient).remove)
        yield


def _require_gradient(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def check_gradients(task: ScoringTask) -> None:
    if torch.is_inference_mode_enabled():
        raise ValueError("heads are scored by gradients: select_heads cannot run inside torch.inference_mode()")
    offloaded = [name for name, weight in task.model.named_parameters() if weight.device.type == "meta"]
    if offloaded:
        raise ValueError(f"{offloaded[0]} is offloaded: scoring heads by gradients needs every weight in memory")
