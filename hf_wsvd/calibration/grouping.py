"""Several sequences in one forward: small models spend their time on launches otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import BESIDE_INPUTS, IGNORED, Batch
from .samples import runs_along_tokens


# Of one forward, padding included. An accelerator wants large batches; a CPU gains nothing from more.
GROUP_TOKENS, CPU_GROUP_TOKENS = 4096, 1024


def group_tokens(device: torch.device) -> int:
    """How many tokens a forward on `device` should have at most."""
    return CPU_GROUP_TOKENS if device.type == "cpu" else GROUP_TOKENS


def groups_of(batches: Iterable[Batch], max_tokens: int) -> Iterator[list[Batch]]:
    """The same batches in the same order, in groups that `joined` makes one of, of at most `max_tokens` tokens.

    Only batches of token columns and of columns that models take concatenated along their first axis stand together;
    a batch that is larger than `max_tokens` stands alone. Where one group ends depends on its own batches and the next
    one alone.
    """
    held: list[Batch] = []
    for batch in batches:
        if held and not (_alike(held[-1], batch) and _tokens([*held, batch]) <= max_tokens):
            yield held
            held = []
        held.append(batch)
    if held:
        yield held


def joined(batches: list[Batch]) -> Batch:
    """One batch of the rows of several, padded to the right; a single one comes back as it is."""
    if len(batches) == 1:
        return batches[0]
    length = max(_shape(batch)[1] for batch in batches)
    if any("attention_mask" not in batch for batch in batches):
        batches = [_with_mask(batch) for batch in batches]
    return {
        name: torch.cat(
            [_padded(name, batch[name], length) if _has_one_a_token(name) else batch[name] for batch in batches]
        )
        for name in batches[0]
    }


def _alike(first: Batch, second: Batch) -> bool:
    """Whether two batches can be one: same columns, kinds and sizes in every axis but rows and tokens."""
    if first.keys() != second.keys():
        return False
    for name, one in first.items():
        other = second[name]
        if one.dtype != other.dtype or one.ndim != other.ndim or one.device != other.device:
            return False
        tokens = _has_one_a_token(name)
        # A mask or position ids of another form than [rows, tokens] are a family's own business.
        if tokens and one.ndim != (3 if name == "inputs_embeds" else 2):
            return False
        if one.shape[2 if tokens else 1 :] != other.shape[2 if tokens else 1 :]:
            return False
    return True


def _has_one_a_token(name: str) -> bool:
    return runs_along_tokens(name) or name in BESIDE_INPUTS


def _shape(batch: Batch) -> tuple[int, int]:
    rows, tokens = batch.get("input_ids", batch.get("inputs_embeds")).shape[:2]
    return rows, tokens


def _tokens(batches: list[Batch]) -> int:
    return sum(_shape(batch)[0] for batch in batches) * max(_shape(batch)[1] for batch in batches)


def _with_mask(batch: Batch) -> Batch:
    first = batch.get("input_ids", batch.get("inputs_embeds"))
    return {**batch, "attention_mask": torch.ones(first.shape[:2], dtype=torch.int64, device=first.device)}


def _padded(name: str, value: Tensor, length: int) -> Tensor:
    missing = length - value.shape[1]
    if missing == 0:
        return value
    fill = IGNORED if name == "labels" else 0
    return F.pad(value, (0, 0, 0, missing) if name == "inputs_embeds" else (0, missing), value=fill)
