"""One pass over the calibration set: second moments of inputs, of outputs and of the answers' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging

from ..decoder import DecoderAttention, decoder_attentions, evaluation_mode
from .answers import Answered, counted_positions, log_probabilities_of, most_likely, placeholder_ids
from .batches import IGNORED, Batch, recorded_source
from .chat import place
from .data import calibration_info, validate_batches
from .dense_side import dense_samples, recorded_probe
from .grouping import grouped
from .samples import keep_samples
from .statistics import Side, Statistics
from .sums import Sums


logger = logging.get_logger("hf_wsvd")

# Gradients of half-precision models would vanish in fp16; a power of two scales them without rounding.
FP16_LOSS_SCALE = 2.0**12


def collect_statistics(
    model: PreTrainedModel, batches: Iterable[Batch], *, fisher: bool = False, keep_answers: bool = True
) -> Statistics:
    """Run `batches` forward and backward through the dense model and accumulate what a fit needs.

    Padding (zeros of `attention_mask`) does not count. The loss of a sequence is the negative log-likelihood of its
    answer: of the tokens that `labels` holds, of all its text where a batch has no labels. Decoder layers are
    recomputed in the backward pass, so that the memory needed besides the model and the sums is one layer's
    activations and every layer's input for some 4,096 tokens.

    Args:
        model: not yet compressed; its weights get no gradients.
        batches: model inputs, with `input_ids` or `inputs_embeds`; on any device.
        fisher: also the element-wise Fisher information, one number a weight, which `refinement="fisher"` needs.
        keep_answers: keep the inputs and the dense model's answers, which `refinement="distillation"` needs.

    Raises:
        ValueError: no batch, wrong columns, weights that are offloaded, no labelled token, or activations or
            gradients that are not finite.
    """
    collector = Collector(model, fisher=fisher, keep_answers=keep_answers)

    def run() -> Iterator[Batch]:
        seen: list[Batch] = []  # by `grouped`, which looks one batch ahead

        def checked() -> Iterator[Batch]:
            for batch in validate_batches(batches, model):
                seen.append(batch)
                yield batch

        for group in grouped(checked()):
            collector.add(group)
            yield from seen
            seen.clear()

    with collector.hooked():
        info = {**calibration_info(run()), **recorded_source(batches)}
    return collector.statistics(info)


class Collector:
    """Hooks on a dense model that add up statistics while batches run through it."""

    def __init__(self, model: PreTrainedModel, *, fisher: bool, keep_answers: bool):
        self.model, self.fisher, self.keep_answers = model, fisher, keep_answers
        self.attentions = decoder_attentions(model)
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

    def add(self, batch: Batch) -> None:
        """One batch forward and backward."""
        keep_samples(self.samples, batch, self.model.dtype)
        inputs = place({name: value for name, value in batch.items() if name != "labels"}, self.model)
        if "inputs_embeds" in inputs:
            inputs["inputs_embeds"] = inputs["inputs_embeds"].detach().requires_grad_()
        self._mask = inputs.get("attention_mask")
        counted = counted_positions(inputs, self._placeholders)
        labels = self._labels(batch, inputs, counted)
        try:
            with torch.enable_grad():
                logits = self.model(**inputs, use_cache=False).logits[:, :-1]
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

    def statistics(self, info: dict[str, Any]) -> Statistics:
        """The means. Raises ValueError if nothing was attended or labelled, or sums are not finite."""
        if info["tokens"] == 0:
            raise ValueError("calibration data attend to no token: every attention_mask is zero")
        if self.sequences == 0:
            raise ValueError("calibration data hold no answer: all labels are -100, so no gradient can be measured")
        result = Statistics(answered=self.answered, info=info)
        result.samples, result.probe = dense_samples(self.model, self.samples), recorded_probe(self.model)
        for attention in self.attentions:
            gram = self.sums.mean(("gram", attention.layer), self.tokens)
            if not torch.isfinite(gram).all():
                raise ValueError(
                    f"the inputs of {attention.side_name('k')} are not finite (NaN or infinity) on the calibration "
                    "data; check the data, or load the model in bfloat16 or float32"
                )
            result.gram[attention.layer] = gram
        for side, projection in self.projections.items():
            heads = self._heads(side)
            weight = projection.weight.detach().double().unflatten(0, (heads, -1))
            result.weight[side] = (weight @ weight.mT).cpu()
            result.output[side] = (weight @ result.gram[side[0]].to(weight) @ weight.mT).cpu()
            energy = self.sums.mean(("energy", side), self.sequences)
            result.gradient[side] = self.sums.mean(("gradient", side), self.sequences) * energy
            if not torch.isfinite(result.gradient[side]).all():
                raise ValueError(
                    f"the gradients of layer {side[0]}'s {side[1]}_proj are not finite (NaN or infinity) on the "
                    "calibration data; load the model in bfloat16 or float32"
                )
            if self.fisher:
                result.fisher[side] = self.sums.mean(("fisher", side), self.sequences).float()
        return result

    def _labels(self, batch: Batch, inputs: Batch, counted: Tensor) -> Tensor | None:
        """`[B, S - 1]`: the token that each position should predict, -100 where none counts."""
        if "labels" in batch:
            return batch["labels"][:, 1:]
        if "input_ids" in inputs:
            return inputs["input_ids"][:, 1:].masked_fill(~counted, IGNORED)
        return None

    def _keep_answers(self, batch: Batch, logits: Tensor, counted: Tensor) -> None:
        rows = logits[counted.to(logits.device)]
        if len(rows) == 0:
            return
        top = torch.cat([most_likely(part) for part in rows.split(512)])
        kept = [log_probabilities_of(a, b) for a, b in zip(rows.split(512), top.split(512))]
        inputs = {name: value.detach().cpu() for name, value in batch.items() if name != "labels"}
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
        grams = sum(8 * a.module.k_proj.in_features**2 for a in self.attentions)
        return grams + (sum(8 * p.weight.numel() for p in self.projections.values()) if self.fisher else 0)


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter takes a gradient inside; outside each is as it was."""
    taking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in taking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in taking:
            parameter.requires_grad_(True)


@contextmanager
def recomputed(model: PreTrainedModel, attentions: list[DecoderAttention]) -> Iterator[None]:
    """Every decoder layer keeps its input alone for the backward pass and runs again there."""
    layers = [model.get_submodule(attention.name.rpartition(".")[0]) for attention in attentions]
    forwards = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in forwards:
            if forward is None:
                del layer.forward
            else:  # a hook of accelerate
                layer.forward = forward


def _require_gradient(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
