"""Tensors of calibration files as they are taken out and checked."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..tensor_file import DTYPES, expect, form
from .batches import BESIDE_INPUTS, Batch
from .samples import runs_along_tokens


INPUT_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Arguments of a forward that say what to compute instead of what on.
NOT_INPUTS = (*BESIDE_INPUTS, "cache", "past_key_values", "use_cache", "return_dict")


class Taken:
    """Tensors of a file as they are taken out of it one by one: what is left at the end does not belong there."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.left = tensors

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
        """The tensor `name`, finite; ValueError unless it is there in this dtype and shape (None: any length)."""
        value = self.left.pop(name, None)
        expect(value is not None, f"it lacks {name}")
        right = value.dtype == dtype and len(value.shape) == len(shape)
        right = right and all(wanted in (None, found) for wanted, found in zip(shape, value.shape))
        wanted = f"[{', '.join('any' if n is None else str(n) for n in shape)}] {str(dtype).removeprefix('torch.')}"
        expect(right, f"{name} is {form(value)}, wanted {wanted}")
        expect(not value.is_floating_point() or bool(torch.isfinite(value).all()), f"{name} is not finite")
        return value

    def inputs(self, prefix: str) -> Batch:
        """The model inputs `prefix.*`, checked as far as that can be done without the model."""
        names = [name for name in self.left if name.startswith(f"{prefix}.")]
        return checked_inputs({name.removeprefix(f"{prefix}."): self.left.pop(name) for name in names}, prefix)

    def finish(self) -> None:
        """Raise ValueError if anything was not taken."""
        expect(not self.left, f"it holds unknown tensors: {', '.join(sorted(self.left)[:3])}")


def checked_inputs(inputs: Batch, label: str) -> Batch:
    """Model inputs of a file that is not trusted; ValueError if no model could take them."""
    for name, value in inputs.items():
        named = INPUT_NAME.fullmatch(name) and name not in NOT_INPUTS
        expect(bool(named) and value.dtype in DTYPES, f"{label} has an input {name[:80]!r} of {value.dtype}")
        finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
        expect(finite, f"input {name!r} of {label} is not finite")
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    expect(tokens is not None, f"{label} has neither input_ids nor inputs_embeds")
    right = tokens.ndim == (2 if "input_ids" in inputs else 3) and tokens.numel() > 0
    expect(
        right and tokens.is_floating_point() != ("input_ids" in inputs), f"the tokens of {label} are {form(tokens)}"
    )
    expect("input_ids" not in inputs or int(tokens.min()) >= 0, f"{label} has negative token ids")
    for name, value in inputs.items():
        if runs_along_tokens(name) and value.ndim == 2:
            fits = value.shape == tokens.shape[:2]
            expect(fits, f"the {name} of {label} is {form(value)}, its tokens are {form(tokens)}")
    return inputs
