"""Large safetensors files: written tensor by tensor, read through a memory map, and not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files import replaced_file


DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


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


def form(value: Tensor) -> str:
    """Shape and dtype for an error."""
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def expect(condition: bool, found: str) -> None:
    """ValueError with what was found instead."""
    if not condition:
        raise ValueError(found)
