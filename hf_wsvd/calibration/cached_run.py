"""One sample through a model and its cache, and what it answers: a prompt, several tokens at once, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ..compat import CACHE_ARGUMENT
from ..decoder import evaluation_mode
from .answers import log_probabilities_of, most_likely, placeholder_ids
from .chat import place
from .samples import MAX_POSITIONS, runs_along_tokens


DECODED = 12  # tokens after the prompt


def token_column(inputs: dict[str, Tensor]) -> Tensor:
    """`input_ids` `[B, S]`, else `inputs_embeds` `[B, S, hidden]`."""
    return inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]


def compared_positions(inputs: dict[str, Tensor]) -> Tensor:
    """bool `[B, P]`: which of the last P (at most `MAX_POSITIONS`) positions are compared, padding left out."""
    tokens = token_column(inputs)
    mask = inputs.get("attention_mask")
    mask = torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask
    return mask[:, -MAX_POSITIONS:] != 0


def split_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> int:
    """Tokens of a sample that go in with the prompt: all but the last few, and every token that stands for an image.

    Raises ValueError if nothing is left to decode.
    """
    length = token_column(inputs).shape[1]
    split = max(length - DECODED, 1)
    if "input_ids" in inputs:
        marks = placeholder_ids(model)
        columns = [column for column, ids in enumerate(inputs["input_ids"].T.tolist()) if set(ids) & set(marks)]
        if columns and not all(runs_along_tokens(name) for name in inputs):
            split = max(split, columns[-1] + 1)
    if split >= length:
        raise ValueError("no token follows the images")
    return split


@torch.no_grad()
def run(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    split: int,
    top: Tensor | None = None,
    cache: Cache | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sample through the model: its first `split` tokens, then several at once, then one at a time.

    Args:
        top: tokens `[N, K]` whose probabilities are wanted; None takes the model's own `TOP` most likely ones.
        cache: empty; None takes the model's ordinary one.

    Returns:
        These tokens, the log-probabilities of them and of all others together (`[N, K + 1]` fp32), and the most likely
        token `[N]`; all on the CPU.

    Raises:
        ValueError: the model does not give logits for every token, or `top` does not fit its vocabulary.
    """
    compared = compared_positions(inputs)
    length = token_column(inputs).shape[1]
    first = length - compared.shape[1]
    placed = place(inputs, model)
    if cache is None:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    parts = []
    with evaluation_mode(model), undisturbed(model):
        for begin, end in steps(split, length):
            arguments = part_of(placed, begin, end)
            output = model(**arguments, use_cache=True, return_dict=True, **{CACHE_ARGUMENT: cache})
            logits = getattr(output, "logits", None)
            if logits is None or logits.shape[1] != end - begin:
                raise ValueError(f"{type(model).__name__} gives no logits for {end - begin} tokens")
            parts.append(logits[:, max(first - begin, 0) :])
        logits = torch.cat(parts, dim=1)
        logits = logits[compared.to(logits.device)].float()
    if top is None:
        top = most_likely(logits)
    if int(top.max()) >= logits.shape[-1]:
        raise ValueError(f"token {int(top.max())} is outside the vocabulary of {logits.shape[-1]}")
    top = top.to(logits.device, torch.int64)
    return top.int().cpu(), log_probabilities_of(logits, top).cpu(), logits.argmax(-1).int().cpu()


def steps(split: int, length: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of every forward: the prompt, half of the other tokens at once, the rest one at a time."""
    yield 0, split
    half = (split + length + 1) // 2
    yield split, half
    for begin in range(half, length):
        yield begin, begin + 1


def part_of(inputs: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The model inputs of one step. Images go in with the prompt, and so does what says where they stand."""
    part = {}
    for name, value in inputs.items():
        if name == "inputs_embeds":
            part[name] = value[:, begin:end]
        elif name == "attention_mask":
            # Over cached tokens too. Families with position ids of their own (M-RoPE) derive too many of them from it.
            if begin == 0 or not bool(value.all()):
                part[name] = value[:, :end]
        elif name in ("input_ids", "position_ids") or (begin == 0 and runs_along_tokens(name)):
            part[name] = value[..., begin:end]
        elif begin == 0:
            part[name] = value
    return part


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Random state and what M-RoPE models remember of the last image are outside as they were."""
    remembered = [(module, module.rope_deltas) for module in model.modules() if hasattr(module, "rope_deltas")]
    for module, _ in remembered:
        module.rope_deltas = None
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, deltas in remembered:
            module.rope_deltas = deltas
