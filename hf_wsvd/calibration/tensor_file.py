"""Large safetensors files: written tensor by tensor, read through a memory map, and not trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import replaced_file
from .batches import Batch
from .samples import runs_along_tokens


DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
INPUT_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Arguments of a forward that say what to compute instead of what on.
NOT_INPUTS = ("labels", "cache", "past_key_values", "use_cache", "return_dict")


@dataclass(frozen=True)
class Entry:
    """One tensor to write: its name, the dtype it is stored in, and how to get at it."""

    name: str
    dtype: torch.dtype
    read: Callable[[], Tensor]


def entries(prefix: str, tensors: Mapping[str, Tensor]) -> list[Entry]:
    """Entries `prefix.name` of tensors that are stored as they are."""
    return [Entry(f"{prefix}.{name}", value.dtype, lambda value=value: value) for name, value in tensors.items()]


def write_tensors(path: Path, key: str, header: dict[str, Any], tensors: Iterable[Entry]) -> None:
    """Write a safetensors file whole or not at all, with `header` as JSON under `key` of its metadata.

    safetensors' own writer wants every tensor on the CPU in its final dtype at once; this one needs one at a time.

    Raises:
        ValueError: a dtype that is not stored.
        OSError: the file cannot be written.
    """
    tensors = list(tensors)
    table: dict[str, Any] = {"__metadata__": {"format": "pt", key: json.dumps(header)}}
    end = 0
    # Large elements first: every tensor then starts at a multiple of its element's size, as readers want it.
    tensors.sort(key=lambda entry: (-entry.dtype.itemsize, entry.name))
    for entry in tensors:
        if entry.dtype not in DTYPES:
            raise ValueError(f"{entry.name} cannot be stored: it is {entry.dtype}")
        shape = list(entry.read().shape)
        begin, end = end, end + torch.Size(shape).numel() * entry.dtype.itemsize
        table[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with replaced_file(path) as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for entry in tensors:
            value = entry.read().detach().to("cpu", entry.dtype).contiguous()
            stream.write(value.flatten().view(torch.uint8).numpy().data)  # bytes: numpy has no bfloat16


def read_tensors(path: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON header and the tensors of a file, which are views of its memory map: read from disk as they are used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no readable safetensors file, or one without such a header.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if key not in metadata:
                raise ValueError(f"it holds no {key.replace('_', ' ')}")
            header = json.loads(metadata[key])
            if not isinstance(header, dict):
                raise ValueError("its header is no mapping")
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (SafetensorError, OSError, ValueError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable {key.replace('_', ' ')} file (truncated?): {error}") from error


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


def form(value: Tensor) -> str:
    """Shape and dtype for an error."""
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def expect(condition: bool, found: str) -> None:
    """ValueError with what was found instead."""
    if not condition:
        raise ValueError(found)
