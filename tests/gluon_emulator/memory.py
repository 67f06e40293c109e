"""Pointers into global memory. No address outside of the tensor that a pointer was made of may be touched."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from .errors import RaceError, kernel_line, require
from .program import program
from .values import COMPUTED, OF_TORCH, STORED, Tensor, computed, poison, wrapped


class Memory:
    """The addresses from a tensor's first number to its last."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.dtype = name, OF_TORCH[tensor.dtype]
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        span = span if tensor.numel() else 0
        self.numbers = tensor.as_strided((span,), (1,)).view(STORED[self.dtype])
        self.writers = torch.zeros(span, dtype=torch.int32)  # of each number in this launch


class Pointer:
    """Addresses, as offsets in numbers from a tensor's first."""

    def __init__(self, memory: Memory, offset: Tensor) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = tl.pointer_type(memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        require(
            isinstance(other, int) or not other.dtype.is_floating(), f"a pointer to {self.memory.name} plus {other}"
        )
        return Pointer(self.memory, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset - other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key])

    def touched(self, mask: Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Offsets, with 0 where the mask is false, and the mask in their shape."""
        offset, seen = self.offset.data, None
        if mask is not None:
            require(mask.dtype == tl.int1, f"a mask of {mask.dtype}")
            offset, seen = torch.broadcast_tensors(offset, mask.data)
            require(offset.shape == self.offset.data.shape or not self.offset.shape, "the mask has more axes' sizes")
            offset = torch.where(seen, offset, 0)
        size = self.memory.numbers.numel()
        if seen is None or bool(seen.any()):
            low, high = int(offset.min()), int(offset.max())
            require(low >= 0 and high < size, f"{self.memory.name}[{low}..{high}] of {size} numbers")
        return offset, seen


def load(pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    """Where the mask is false and there is no `other`, numbers that show if they are used."""
    mask = condition(mask)
    offset, seen = pointer.touched(mask)
    memory, dtype = pointer.memory, pointer.memory.dtype
    own_or_nobodys(memory, offset if seen is None else offset[seen])
    if seen is not None and not bool(seen.any()):
        data = poison(dtype, tuple(offset.shape))
    else:
        data = computed(memory.numbers[offset.to(torch.int64)], dtype)
    if seen is not None:
        if other is None:
            rest = poison(dtype, ())
        else:
            rest = wrapped(other.data if isinstance(other, Tensor) else torch.tensor(other), dtype)
        data = torch.where(seen, data, rest)
    return Tensor(data.to(COMPUTED[dtype]), dtype, pointer.offset._layout)


def store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    offset, seen = pointer.touched(condition(mask))
    data = value.data if isinstance(value, Tensor) else torch.tensor(value)
    require(data.ndim in (0, offset.ndim), f"{list(data.shape)} stored at {list(offset.shape)} addresses")
    data = wrapped(data, pointer.memory.dtype).to(pointer.memory.numbers.dtype).expand(offset.shape)
    if seen is not None:
        offset, data = offset[seen], data[seen]
    own_or_nobodys(pointer.memory, offset)
    pointer.memory.writers[offset.to(torch.int64)] = program().running.number
    pointer.memory.numbers[offset.to(torch.int64)] = data


def own_or_nobodys(memory: Memory, offset: torch.Tensor) -> None:
    """Nothing orders programs, and what partitions exchange goes through shared memory."""
    writers = memory.writers[offset.to(torch.int64)]
    others = (writers != 0) & (writers != program().running.number)
    if bool(others.any()):
        raise RaceError(
            f"{kernel_line()}: {memory.name}[{int(offset[others].min())}] was written by another partition"
        )


def condition(mask: Any) -> Tensor | None:
    """A mask as a tensor."""
    return Tensor(torch.tensor(mask), tl.int1) if isinstance(mask, bool) else mask
