"""A few small samples of a calibration set: the inputs that a checkpoint's self-check is recorded on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .batches import BESIDE_INPUTS


MAX_SAMPLES = 4
MAX_TOKENS = 128  # of a sample without images; one with images stays whole
MAX_POSITIONS = 128  # of a row, counted from its end, whose answers are stored
MAX_BYTES = 4 * 2**20  # of all samples together, with their answers
ANSWER_BYTES = 800  # of one position

TOKEN_COLUMNS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")


def runs_along_tokens(column: str) -> bool:
    """Whether a model input has one entry a token, so that it can be cut where the tokens are cut."""
    return column in TOKEN_COLUMNS or column.endswith("token_type_ids")


def keep_samples(samples: list[dict[str, Tensor]], batch: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Append to `samples` what of a batch still fits: copies on the CPU, floating tensors in `dtype`, no labels.

    A row of tokens alone becomes a sample of its own, without its padding and cut to `MAX_TOKENS`. A batch with
    images gives one sample: its first row, where every column has one entry a row, else all of it. What cannot be cut
    into a prompt and a continuation is left out: single tokens, masks of another kind than `[batch, tokens]`.
    """
    columns = {name: value for name, value in batch.items() if name not in BESIDE_INPUTS}
    first = columns["input_ids"] if "input_ids" in columns else columns["inputs_embeds"]
    rows = first.shape[0]
    mask = columns.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return
    if all(runs_along_tokens(name) for name in columns):
        candidates = (_tokens_of_row(columns, row) for row in range(rows))
    elif rows > 1 and all(value.ndim and value.shape[0] == rows for value in columns.values()):
        candidates = iter([{name: value[:1] for name, value in columns.items()}])
    else:
        candidates = iter([columns])
    held = sum(_stored_bytes(sample, dtype) for sample in samples)
    while len(samples) < MAX_SAMPLES and (candidate := next(candidates, None)) is not None:
        if candidate.get("input_ids", candidate.get("inputs_embeds")).shape[1] < 2:
            continue
        size = _stored_bytes(candidate, dtype)
        if held + size > MAX_BYTES:
            continue
        # A copy: a view would keep the whole batch in memory.
        samples.append({name: _copy(value, dtype) for name, value in candidate.items()})
        held += size


def _tokens_of_row(columns: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """The attended tokens of one row, at most `MAX_TOKENS` from its start. Position ids may have leading axes."""
    mask = columns.get("attention_mask")
    first = columns["input_ids"] if "input_ids" in columns else columns["inputs_embeds"]
    if mask is not None:
        kept = mask[row].nonzero()[:MAX_TOKENS, 0]
    else:
        kept = torch.arange(min(first.shape[1], MAX_TOKENS), device=first.device)
    sample = {}
    for name, value in columns.items():
        if name == "inputs_embeds":
            sample[name] = value[row : row + 1, kept.to(value.device)]
        elif value.ndim >= 2:
            sample[name] = value[..., row : row + 1, kept.to(value.device)]
    return sample


def _stored_bytes(sample: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes of a sample in a self-check file, floating inputs in `dtype`."""
    rows, tokens = sample.get("input_ids", sample.get("inputs_embeds")).shape[:2]
    sizes = [v.numel() * (dtype if v.is_floating_point() else v.dtype).itemsize for v in sample.values()]
    return sum(sizes) + ANSWER_BYTES * rows * min(tokens, MAX_POSITIONS)


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype, copy=True).contiguous()
