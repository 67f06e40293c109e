"""Tensors in registers: numbers of a Triton dtype on the CPU, rounded as the kernel's dtypes say.

Layouts are carried to be asked for (`x.type.layout`), never used: whether they fit is settled by compiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental.gluon.language import SliceLayout

from .errors import require


# How numbers are computed with; unsigned ones in a wider type, since torch has no arithmetic on them.
COMPUTED = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint8: torch.uint8,
    tl.uint16: torch.int32,
    tl.uint32: torch.int64,
}
# How they lie in memory.
STORED = {**COMPUTED, tl.int1: torch.uint8, tl.uint16: torch.int16, tl.uint32: torch.int32}
OF_TORCH = {
    **{kind: dtype for dtype, kind in COMPUTED.items() if dtype not in (tl.uint16, tl.uint32, tl.int1)},
    torch.bool: tl.int1,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
}


class Derived:
    """The layout that a compiler would infer for the result of a reshape and the like."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Type(NamedTuple):
    """What `x.type` tells."""

    layout: Any
    shape: tuple[int, ...]
    element_ty: Any


class Tensor:
    """Numbers, or a scalar: `data` of no dimension. `data` None: the sum of a product that was not waited for."""

    def __init__(self, data: torch.Tensor | None, dtype: Any, layout: Any = None) -> None:
        self._data, self.dtype, self._layout = data, dtype, layout

    @property
    def data(self) -> torch.Tensor:
        require(self._data is not None, "the result of a product is read before warpgroup_mma_wait")
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def layout(self) -> Any:
        return Derived(self.data.ndim) if self._layout is None else self._layout

    @property
    def type(self) -> Type:
        return Type(self.layout, self.shape, self.dtype)

    def __index__(self) -> int:
        require(self.data.ndim == 0, f"a tensor {list(self.data.shape)} stands where a scalar must")
        return int(self.data)

    __int__ = __index__

    def __bool__(self) -> bool:
        require(self.data.ndim == 0, f"a tensor {list(self.data.shape)} decides a branch")
        return bool(self.data)

    __hash__ = object.__hash__

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if bitcast:
            require(dtype.primitive_bitwidth == self.dtype.primitive_bitwidth, f"bitcast {self.dtype} to {dtype}")
            return Tensor(computed(stored(self).view(STORED[dtype]), dtype), dtype, self._layout)
        if self.dtype.is_floating() and not dtype.is_floating():
            return Tensor(wrapped(self.data.to(torch.int64), dtype), dtype, self._layout)
        return Tensor(wrapped(self.data, dtype), dtype, self._layout)

    cast = to

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        require(all(k is None or k == slice(None) for k in keys), f"index {key} is neither : nor None")
        require(sum(k is not None for k in keys) == self.data.ndim, f"index {key} of {self.data.ndim} axes")
        layout = self._layout
        parents = layout.parent if isinstance(layout, SliceLayout) and None in keys else None
        if parents is not None:
            require(keys.index(None) == layout.dim, f"axis {keys.index(None)} is new, the layout lacks {layout.dim}")
        return Tensor(self.data[key], self.dtype, layout if None not in keys else parents)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.data.reshape(dims(shape)), self.dtype)

    def permute(self, *order: Any) -> Tensor:
        return Tensor(self.data.permute(dims(order)), self.dtype)

    def trans(self, *order: Any) -> Tensor:
        return self.permute(*order) if order else self.permute(1, 0)

    def __neg__(self) -> Tensor:
        return Tensor(wrapped(-self.data, self.dtype), self.dtype, self._layout)

    def __invert__(self) -> Tensor:
        return Tensor(wrapped(~self.data, self.dtype), self.dtype, self._layout)

    def split(self) -> tuple[Tensor, Tensor]:
        require(self.shape[-1:] == (2,), f"split of {self.shape}, whose last axis is not of 2")
        return Tensor(self.data[..., 0], self.dtype), Tensor(self.data[..., 1], self.dtype)


def dims(numbers: tuple) -> list[int]:
    """Axes or sizes given one by one or as a list."""
    return [int(n) for n in (numbers[0] if len(numbers) == 1 and isinstance(numbers[0], (list, tuple)) else numbers)]


def wrapped(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Numbers as a dtype has them: rounded, or modulo two to the power of its width."""
    if dtype in (tl.uint16, tl.uint32):
        return data.to(COMPUTED[dtype]) & (2**dtype.primitive_bitwidth - 1)
    return data.to(COMPUTED[dtype])


def stored(tensor: Tensor) -> torch.Tensor:
    """Numbers as they lie in memory."""
    return tensor.data.to(STORED[tensor.dtype])


def computed(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Numbers from memory."""
    return wrapped(data, dtype)


def scalar(value: bool | int | float | Tensor) -> Tensor:
    """A number of Python as a kernel's argument: int32 or int64, fp32."""
    if not isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, float):
        return Tensor(torch.tensor(value, dtype=torch.float32), tl.float32)
    dtype = tl.int1 if isinstance(value, bool) else tl.int32 if -(2**31) <= value < 2**31 else tl.int64
    return Tensor(torch.tensor(value, dtype=COMPUTED[dtype]), dtype)


def poison(dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that show if they are used: NaN, and for whole numbers all bits set."""
    if dtype.is_floating():
        return torch.full(shape, float("nan"), dtype=COMPUTED[dtype])
    return wrapped(torch.full(shape, -1, dtype=torch.int64), dtype)
