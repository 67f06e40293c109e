"""Second moments of inputs, of outputs and of the answers' gradients, added up by hooks on a dense model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..decoder import decoder_attentions, decoder_shape, evaluation_mode
from ..low_precision.linear import QuantizedWeight
from ..modules import LatentProjection
from .answers import Answered, counted_positions, log_probabilities_of, most_likely, placeholder_ids
from .batches import BESIDE_INPUTS, IGNORED, Batch
from .chat import place
from .dense_side import dense_samples, recorded_probe
from .grouping import joined
from .modes import FP16_LOSS_SCALE, frozen, recomputed
from .samples import keep_samples
from .statistics import Side, Statistics, dtype_name
from .sums import Sums


logger = logging.get_logger("hf_wsvd")

COMPRESSED = (LatentProjection, QuantizedWeight)


class Collector:
    """Hooks on a dense model that add up statistics while batches run through it."""

    def __init__(self, model: PreTrainedModel, *, fisher: bool, keep_answers: bool):
        self.model, self.fisher, self.keep_answers = model, fisher, keep_answers
        self.attentions = decoder_attentions(model)
        if not self.attentions:
            raise ValueError(f"{type(model).__name__} has no attention with separate k_proj and v_proj to calibrate")
        compressed = [a.side_name("k") for a in self.attentions if isinstance(a.module.k_proj, COMPRESSED)]
        if compressed:
            raise ValueError(f"{compressed[0]} is low-rank already: statistics are those of the dense model")
        if torch.is_inference_mode_enabled():
            raise ValueError("calibration needs gradients and cannot run inside torch.inference_mode()")
        offloaded = [a.side_name("k") for a in self.attentions if a.module.k_proj.weight.device.type == "meta"]
        if offloaded:
            raise ValueError(
                f"{offloaded[0]} is offloaded to disk or CPU: calibration needs every weight in memory; load the "
                "model with a device_map that fits, compress and save it, and load the compressed checkpoint with "
                "offloading"
            )
        self.projections = {
            (attention.layer, side): getattr(attention.module, f"{side}_proj")
            for attention in self.attentions
            for side in ("q", *"kv")
            if attention.heads_of(side)
        }
        self.sums = Sums(self._needed_bytes())
        self.tokens = self.sequences = self.labelled = 0
        self.answered: list[Answered] = []
        self.samples: list[Batch] = []
        self._mask: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}
        self._backward = False
        self._scale = FP16_LOSS_SCALE if model.dtype == torch.float16 else 1.0
        self._placeholders = placeholder_ids(model)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The model in evaluation mode, its weights frozen, its layers recomputed in the backward pass."""
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(self.model))
            stack.enter_context(frozen(self.model))
            stack.enter_context(recomputed(self.model, self.attentions))
            for attention in self.attentions:
                hook = attention.module.k_proj.register_forward_pre_hook(partial(self._see_input, attention.layer))
                stack.callback(hook.remove)
            for side, projection in self.projections.items():
                stack.callback(projection.register_forward_hook(partial(self._see_output, side)).remove)
            embedding = self.model.get_input_embeddings().register_forward_hook(_require_gradient)
            stack.callback(embedding.remove)
            yield

    def add(self, members: list[Batch]) -> None:
        """Batches that can be joined, forward and backward as one."""
        for batch in members:  # one by one: joined, a row with images would be kept with its padding
            keep_samples(self.samples, batch, self.model.dtype)
        batch = joined(members)
        inputs = place({name: value for name, value in batch.items() if name not in BESIDE_INPUTS}, self.model)
        if "inputs_embeds" in inputs:
            inputs["inputs_embeds"] = inputs["inputs_embeds"].detach().requires_grad_()
        self._mask = inputs.get("attention_mask")
        counted = counted_positions(inputs, self._placeholders)
        labels = self._labels(batch, inputs, counted)
        try:
            with torch.enable_grad():
                logits = logits_of(self.model, inputs)[:, :-1]
                if labels is None:  # embeddings alone: the model's own choice stands for the answer
                    labels = logits.argmax(-1).masked_fill(~counted.to(logits.device), IGNORED)
                labels = labels.to(logits.device)
                chosen = labels != IGNORED
                loss = F.cross_entropy(logits[chosen].float(), labels[chosen], reduction="sum")
            if self.keep_answers:
                self._keep_answers(batch, logits.detach(), counted)
            if bool(chosen.any()):
                self._backward = True
                (self._scale * loss).backward()
        finally:
            self._backward, self._mask = False, None
            self._inputs.clear()
        self.sequences += int(chosen.any(1).sum())
        self.labelled += int(chosen.sum())

    def check(self) -> None:
        """Raise ValueError if nothing was attended or labelled, or sums are not finite; warn of too few tokens."""
        if self.tokens == 0:
            raise ValueError("calibration data attend to no token: every attention_mask is zero")
        if self.sequences == 0:
            raise ValueError("calibration data hold no answer: all labels are -100, so no gradient can be measured")
        for attention in self.attentions:
            if not torch.isfinite(self.sums.values["gram", attention.layer]).all():
                raise ValueError(
                    f"the inputs of {attention.side_name('k')} are not finite (NaN or infinity) on the calibration "
                    "data; check the data, or load the model in bfloat16 or float32"
                )
        for side in self.projections:
            if not all(torch.isfinite(self.sums.values[kind, side]).all() for kind in ("gradient", "energy")):
                raise ValueError(
                    f"the gradients of layer {side[0]}'s {side[1]}_proj are not finite (NaN or infinity) on the "
                    "calibration data; load the model in bfloat16 or float32"
                )
        inputs = max(attention.module.k_proj.in_features for attention in self.attentions)
        head_dim = max(attention.head_dim for attention in self.attentions)
        for count, needed, what, moment in (
            (self.tokens, inputs, "tokens", f"{inputs:,} inputs"),
            (self.labelled, head_dim, "answer tokens", f"gradients of heads of {head_dim:,}"),
        ):
            if count < needed:
                logger.warning(
                    f"hf_wsvd: calibration data hold {count:,} {what} in {self.sequences:,} sequences with an answer, "
                    f"fewer than the {needed:,} that the second moment of {moment} needs: it is singular, and "
                    "directions that the data never showed are guessed; use more sequences"
                )

    def statistics(self, info: dict[str, Any]) -> Statistics:
        """The means. The sums are given up."""
        grams, outputs, weights, gradients, fisher = {}, {}, {}, {}, {}
        for attention in self.attentions:
            grams[attention.layer] = self.sums.take_mean(("gram", attention.layer), self.tokens)
        for side, projection in self.projections.items():
            weight = projection.weight.detach().double().unflatten(0, (self._heads(side), -1))
            weights[side] = (weight @ weight.mT).cpu()
            outputs[side] = (weight @ grams[side[0]].to(weight) @ weight.mT).cpu()
            energy = self.sums.take_mean(("energy", side), self.sequences)
            gradients[side] = self.sums.take_mean(("gradient", side), self.sequences) * energy
            if self.fisher:
                fisher[side] = self.sums.take_mean(("fisher", side), self.sequences).float()
        return Statistics(
            grams,
            outputs,
            weights,
            gradients,
            fisher,
            answered=self.answered,
            samples=dense_samples(self.model, self.samples),
            probe=recorded_probe(self.model),
            info=info,
            decoder_shape=decoder_shape(self.model),
            dtype=dtype_name(self.model),
        )

    def sum_shapes(self) -> dict[tuple[str, Any], tuple[int, ...]]:
        """Key to shape of every sum that is measured."""
        shapes: dict[tuple[str, Any], tuple[int, ...]] = {}
        for attention in self.attentions:
            shapes["gram", attention.layer] = (attention.module.k_proj.in_features,) * 2
        for side, projection in self.projections.items():
            heads = self._heads(side)
            shapes["gradient", side] = (heads, *(projection.out_features // heads,) * 2)
            shapes["energy", side] = ()
            if self.fisher:
                shapes["fisher", side] = tuple(projection.weight.shape)
        return shapes

    def _labels(self, batch: Batch, inputs: Batch, counted: Tensor) -> Tensor | None:
        """`[B, S - 1]`: the token that each position should predict, -100 where none counts."""
        if "labels" in batch:
            labels, mask = batch["labels"][:, 1:].long(), batch.get("attention_mask")
            if mask is not None and mask.shape == batch["labels"].shape:
                # The first token of a row with padding on its left is predicted from padding.
                labels = labels.masked_fill((mask[:, 1:] == 0) | (mask[:, :-1] == 0), IGNORED)
            return labels
        if "input_ids" in inputs:
            return inputs["input_ids"][:, 1:].long().masked_fill(~counted, IGNORED)
        return None

    def _keep_answers(self, batch: Batch, logits: Tensor, counted: Tensor) -> None:
        rows = logits[counted.to(logits.device)]
        if len(rows) == 0:
            return
        top = torch.cat([most_likely(part) for part in rows.split(512)])
        kept = [log_probabilities_of(a, b) for a, b in zip(rows.split(512), top.split(512))]
        inputs = {name: value.detach().cpu() for name, value in batch.items() if name not in BESIDE_INPUTS}
        self.answered.append(Answered(inputs, counted.cpu(), top.int().cpu(), torch.cat(kept).cpu()))

    def _see_input(self, layer: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        if self._backward:
            self._inputs[layer] = x
            return
        mask = self._mask
        # Some models drop or merge tokens before the decoder; there a mask of another length says nothing.
        x = x[mask.to(x.device).bool()] if mask is not None and mask.shape == x.shape[:2] else x.flatten(0, 1)
        if layer == self.attentions[0].layer:
            self.tokens += len(x)
        x = x.float()
        self.sums.add(("gram", layer), x.T @ x)

    def _see_output(self, side: Side, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not self._backward and output.requires_grad:
            output.register_hook(partial(self._see_gradient, side))

    def _see_gradient(self, side: Side, gradient: Tensor) -> None:
        gradient = gradient.float() / self._scale
        energy = gradient.square().sum((1, 2))
        # Every sequence weighs the same: a model that is sure of most answers has gradients from a few alone.
        unit = gradient * energy.clamp_min(1e-38).rsqrt()[:, None, None]
        unit = unit.flatten(0, 1).unflatten(-1, (self._heads(side), -1)).transpose(0, 1)
        self.sums.add(("gradient", side), unit.transpose(1, 2) @ unit)
        self.sums.add(("energy", side), energy.sum())
        if self.fisher:
            inputs = self._inputs[side[0]].float()
            for x, g in zip(inputs, gradient):
                self.sums.add(("fisher", side), (g.T @ x).square_())

    def _heads(self, side: Side) -> int:
        attention = next(a for a in self.attentions if a.layer == side[0])
        return attention.heads_of(side[1])

    def _needed_bytes(self) -> int:
        return sum(8 * math.prod(shape) for shape in self.sum_shapes().values())


def logits_of(model: PreTrainedModel, inputs: Batch) -> Tensor:
    """`[B, S, vocabulary]` of a forward without cache. ValueError for a model without a language-model head."""
    logits = getattr(model(**inputs, use_cache=False), "logits", None)
    if logits is None:
        raise ValueError(
            f"{type(model).__name__} answers nothing that a loss could be measured by: load the model with its head "
            "(AutoModelForCausalLM, AutoModelForImageTextToText); what is saved loads as the base model too"
        )
    return logits


def _require_gradient(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
