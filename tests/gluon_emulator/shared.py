"""Shared memory, its views, and the order of accesses to it."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

import torch
import triton.language as tl

from .clocks import Access, By, check, remember
from .errors import require
from .program import program
from .values import STORED, Tensor, Type, computed, poison, stored


class Allocation:
    """One call of `allocate_shared_memory`."""

    def __init__(self, name: str, dtype: Any, shape: list[int], layout: Any) -> None:
        self.name, self.dtype, self.layout = name, dtype, layout
        self.numbers = poison(dtype, tuple(shape)).to(STORED[dtype])
        self.written = torch.zeros(shape, dtype=torch.bool)
        self.accesses: list[Access] = []


class View:
    """A box of an allocation, its axes in some order."""

    def __init__(self, memory: Allocation, box: tuple[tuple[int, int], ...], axes: tuple[int, ...]) -> None:
        self.memory, self.box, self.axes = memory, box, axes
        self.dtype, self.layout = memory.dtype, memory.layout

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.box[axis][1] - self.box[axis][0] for axis in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def type(self) -> Type:
        return Type(self.layout, self.shape, self.dtype)

    def __str__(self) -> str:
        return self.memory.name + str([start if stop == start + 1 else f"{start}:{stop}" for start, stop in self.box])

    def index(self, index: Any) -> View:
        start = int(index)
        view = self.slice(start, 1)
        return View(self.memory, view.box, self.axes[1:])

    def slice(self, start: Any, length: int, dim: int = 0) -> View:
        start, axis = int(start), self.axes[dim]
        low, high = self.box[axis]
        require(
            start >= 0 and low + start + length <= high, f"{start}:{start + length} of {high - low} places of {self}"
        )
        box = list(self.box)
        box[axis] = (low + start, low + start + length)
        return View(self.memory, tuple(box), self.axes)

    def permute(self, order: Any) -> View:
        return View(self.memory, self.box, tuple(self.axes[axis] for axis in order))

    def load(self, layout: Any = None) -> Tensor:
        self.access(writes=False, asynchronous=False)
        return Tensor(computed(self.numbers().clone(), self.dtype), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        require(value.dtype == self.dtype, f"{value.dtype} stored to {self} of {self.dtype}")
        require(value.shape == self.shape, f"{list(value.shape)} stored to {self} of {list(self.shape)}")
        self.access(writes=True, asynchronous=False)
        self.put(stored(value))

    def numbers(self) -> torch.Tensor:
        """What is there, as it lies in memory."""
        require(bool(self._box(self.memory.written).all()), f"{self} is read before it was written")
        return self._box(self.memory.numbers)

    def put(self, numbers: torch.Tensor) -> None:
        self._box(self.memory.numbers).copy_(numbers)
        self._box(self.memory.written).fill_(True)

    def access(self, writes: bool, asynchronous: bool) -> Access:
        """Check and remember an access by the partition that runs."""
        own = program().running
        access = Access(self.box, writes, own.name, own.tick(), 0 if asynchronous else None)
        check(self.memory.name, self.memory.accesses, access, By(own.clock, asynchronous))
        remember(self.memory.accesses, access)
        if not asynchronous:
            own.unfenced.append(access)
        return access

    def _box(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view's part of a tensor in the allocation's shape."""
        dropped = [axis for axis in range(tensor.ndim) if axis not in self.axes]
        part = tensor[tuple(slice(*ends) for ends in self.box)].permute(*dropped, *self.axes)
        return part[(0,) * len(dropped)]


def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any, value: Tensor | None = None) -> View:
    """Memory that holds nothing to be read, named as the variable that it is bound to or the line that asks for it."""
    caller = sys._getframe(1)
    bound = re.match(r"\s*(\w+) = ", linecache.getline(caller.f_code.co_filename, caller.f_lineno))
    name = f"memory of line {caller.f_lineno}" if bound is None else bound[1]
    memory = Allocation(name, tl.int64 if dtype is None else dtype, [int(size) for size in shape], layout)
    view = View(memory, tuple((0, int(size)) for size in shape), tuple(range(len(shape))))
    if value is not None:
        view.store(value)
    return view


def fence_async_shared(cluster: bool = False) -> None:
    """Accesses so far are ordered before what bulk copies and tensor cores do behind a barrier."""
    own = program().running
    time = own.tick()
    for access in own.unfenced:
        access.fenced = time
    own.unfenced.clear()
