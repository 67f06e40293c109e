"""Refinement of the factors: they learn to give the dense model's answers on the calibration set."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.answers import Answered, divergences, log_probabilities_of
from ..calibration.chat import place
from ..calibration.collector import logits_of
from ..calibration.modes import FP16_LOSS_SCALE, frozen, recomputed
from ..calibration.sums import FREE_SHARE, free_bytes
from ..decoder import decoder_attentions, evaluation_mode
from ..modules import LatentProjection
from .factorise import orthonormal, spread


logger = logging.get_logger("hf_wsvd")

HELD_OUT_EVERY = 8  # one group in so many shows whether the factors got better
CHECKS = 6  # of the held-out groups, evenly over the steps
SETBACK = 0.3  # of the learning rate after a check without progress
SMALLEST_SCALE = 0.02  # of the learning rate; below it no progress is to be expected
NOTHING_TO_GAIN = 1e-3  # held-out KL, nats a token
WARM_UP = 10  # steps
ACTIVATION_BYTES = 64  # of one layer and token, in units of the hidden size: what autograd keeps of a Llama layer
BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0
ROWS = 1024  # positions whose probabilities are in memory at a time


def distill(
    model: PreTrainedModel,
    projections: list[LatentProjection],
    answered: list[Answered],
    *,
    steps: int,
    learning_rate: float,
    seed: int = 0,
    rotated: Collection[LatentProjection] = (),
) -> dict[str, float | int]:
    """Train the factors of `projections`, which stand in `model`, towards the dense model's recorded answers.

    The loss is the KL divergence from the dense model's next-token distribution (its 64 most likely tokens, and all
    others together) at every position of text. Adam with a cosine schedule works on fp32 masters; weights other than
    the factors keep still. One group in eight is held out and looked at six times. Where the factors have not got
    better on it, they go back to the best ones and on with a smaller learning rate; the best ones, the given ones
    among them, are the result, so that refinement never ends worse than it began there.

    Args:
        projections: in the model's dtype; those at full rank stay exact.
        answered: groups of sequences with the dense model's answers, one a step; at least one.
        steps: optimiser steps.
        learning_rate: of Adam, for factors of balanced norms.
        seed: of the order of groups.
        rotated: those of `projections` whose latents are to be `spread` in the end.

    Returns:
        `before`, `after`: KL on the held-out groups, nats a token; the `steps` that led to the result; how many groups
        were `held_out`, 0 where there are too few and the trained ones decide. Zeros if nothing is to train.
    """
    cut = [projection for projection in projections if projection.up is not None]
    if not cut:
        return {"before": 0.0, "after": 0.0, "steps": 0, "held_out": 0}
    # From the middle on: the last group may be a small rest.
    first = min(len(answered), HELD_OUT_EVERY) // 2
    held = answered[first::HELD_OUT_EVERY] if len(answered) > HELD_OUT_EVERY // 2 else answered
    trained = [group for group in answered if not any(group is one for one in held)] or answered
    masters = [Master(projection) for projection in cut]
    parameters = [factor for master in masters for factor in master.factors]
    order = _order(len(trained), seed)
    checks = {round(steps * (number + 1) / CHECKS) for number in range(CHECKS)}
    with _training(model, masters, max(group.tokens for group in answered)):
        before = best = _loss_of(model, held)
        if not math.isfinite(before):
            raise ValueError("the low-rank model's answers are not finite: no factors can be learned from them")
        kept, taken, scale = copy.deepcopy(masters), 0, 1.0
        optimizer = torch.optim.Adam(parameters, betas=BETAS)
        rounds = range(1, steps + 1) if before > NOTHING_TO_GAIN else ()
        for step in logging.tqdm(rounds, desc="Refining", unit="step"):
            for group in optimizer.param_groups:
                schedule = min(1.0, step / WARM_UP) * (1 + math.cos(math.pi * step / (steps + 1))) / 2
                group["lr"] = scale * learning_rate * schedule
            _backward(model, trained[next(order)])
            for master in masters:
                master.take_gradients(_scale(model))
            torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
            optimizer.step()
            for master in masters:
                master.write()
            if step not in checks:
                continue
            if (loss := _loss_of(model, held)) < best:
                best, kept, taken = loss, copy.deepcopy(masters), step
                continue
            scale *= SETBACK
            if scale < SMALLEST_SCALE:
                break
            for master, good in zip(masters, kept):
                master.go_back(good)
            optimizer = torch.optim.Adam(parameters, betas=BETAS)
    for master, projection in zip(kept, cut):
        master.finish(projection, projection in rotated)
    logger.info(f"hf_wsvd: refinement took the held-out KL from {before:.4f} to {best:.4f} nats a token")
    return {"before": before, "after": best, "steps": taken, "held_out": len(held) if held is not answered else 0}


class Master:
    """fp32 factors of one projection, at equal norms so that one learning rate suits both."""

    def __init__(self, projection: LatentProjection):
        self.projection = projection
        down = projection.weight.detach().float().unflatten(0, (projection.heads, projection.rank))
        up = projection.up.detach().float()
        scale = (down.flatten(1).norm(dim=1) / up.flatten(1).norm(dim=1)).clamp_min(1e-12).sqrt()[:, None, None]
        self.factors = [nn.Parameter(down / scale), nn.Parameter(up * scale)]

    def __deepcopy__(self, memo: dict) -> Master:
        new = self.__class__.__new__(self.__class__)
        new.projection = self.projection
        new.factors = [factor.detach().clone() for factor in self.factors]
        return new

    def take_gradients(self, scale: float) -> None:
        """Move the projection's gradients here."""
        down, up = self.factors
        down.grad = self.projection.weight.grad.float().view_as(down).div_(scale)
        up.grad = self.projection.up.grad.float().div_(scale)
        self.projection.weight.grad = self.projection.up.grad = None

    @torch.no_grad()
    def go_back(self, to: Master) -> None:
        """Take the factors of `to`, and let the projection have them."""
        for factor, good in zip(self.factors, to.factors):
            factor.copy_(good)
        self.write()

    def write(self) -> None:
        """Let the projection have these factors, rounded to its dtype."""
        down, up = self.factors
        self.projection.weight.data.copy_(down.detach().flatten(0, 1))
        self.projection.up.data.copy_(up.detach())

    def finish(self, projection: LatentProjection, rotated: bool) -> None:
        """Write the factors with orthonormal columns in `up`, and latents `spread` if `rotated`."""
        down, up = orthonormal(*(factor.detach() for factor in self.factors))
        if rotated:
            down, up = spread(down, up)
        projection.weight.data.copy_(down.flatten(0, 1))
        projection.up.data.copy_(up)


@contextmanager
def _training(model: PreTrainedModel, masters: list[Master], tokens: int) -> Iterator[None]:
    """The factors alone take gradients, at balanced norms; on an error they are what they were.

    Args:
        tokens: of the largest group.
    """
    before = [
        (master.projection, master.projection.weight.detach().clone(), master.projection.up.detach().clone())
        for master in masters
    ]
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(frozen(model))
        stack.enter_context(_precision(model))
        if not _activations_fit(model, tokens):
            stack.enter_context(recomputed(model, decoder_attentions(model)))
        for master in masters:
            master.write()
            for factor in (master.projection.weight, master.projection.up):
                factor.requires_grad_(True)
        try:
            yield
        except BaseException:
            for projection, down, up in before:
                projection.weight.data.copy_(down)
                projection.up.data.copy_(up)
            raise
        finally:
            for master in masters:
                for factor in (master.projection.weight, master.projection.up):
                    factor.requires_grad_(False)
                    factor.grad = None


def _precision(model: PreTrainedModel) -> AbstractContextManager:
    """bfloat16 arithmetic for fp32 models on a GPU that has it; the masters stay in fp32."""
    if model.dtype == torch.float32 and model.device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def _activations_fit(model: PreTrainedModel, tokens: int) -> bool:
    """Whether activations of so many tokens fit into memory; else layers run again in the backward pass."""
    config = model.config.get_text_config(decoder=True)
    needed = ACTIVATION_BYTES * tokens * config.hidden_size * config.num_hidden_layers
    return needed < FREE_SHARE * free_bytes(model.device)


def _backward(model: PreTrainedModel, group: Answered) -> None:
    with torch.enable_grad():
        (_scale(model) * _divergence(model, group)).backward()


def _scale(model: PreTrainedModel) -> float:
    return FP16_LOSS_SCALE if model.dtype == torch.float16 else 1.0


@torch.no_grad()
def _loss_of(model: PreTrainedModel, groups: list[Answered]) -> float:
    """Mean KL over the positions of `groups`, nats a token."""
    with evaluation_mode(model):
        losses = [_divergence(model, group).item() * len(group.top) for group in groups]
    return sum(losses) / sum(len(group.top) for group in groups)


def _divergence(model: PreTrainedModel, group: Answered) -> Tensor:
    """Mean KL(dense || model) over a group's positions."""
    logits = logits_of(model, place(group.inputs, model))[:, :-1]
    logits = logits[group.positions.to(logits.device)]
    parts = zip(
        logits.split(ROWS),
        group.top.to(logits.device, torch.int64).split(ROWS),
        group.log_probabilities.to(logits.device).split(ROWS),
    )
    return sum(checkpoint(_part, *part, use_reentrant=False) for part in parts) / len(logits)


def _part(logits: Tensor, top: Tensor, dense: Tensor) -> Tensor:
    return divergences(dense, log_probabilities_of(logits, top)).sum()


def _order(count: int, seed: int) -> Iterator[int]:
    """Endless random orders of `count` groups."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
