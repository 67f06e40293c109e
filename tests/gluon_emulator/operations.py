"""Functions of `gluon.language` on tensors in registers."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon.language import SliceLayout

from .arithmetic import binary, common
from .errors import require
from .values import COMPUTED, Tensor, scalar, wrapped


def full(shape: list[int], value: float | Tensor, dtype: Any, layout: Any = None) -> Tensor:
    number = value.data if isinstance(value, Tensor) else torch.tensor(value)
    return Tensor(wrapped(number, dtype).expand(shape), dtype, layout)


def zeros(shape: list[int], dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    count = end - start
    require(count > 0 and count & (count - 1) == 0, f"arange of {count} numbers, not a power of two")
    return Tensor(torch.arange(start, end, dtype=torch.int32), tl.int32, layout)


def convert_layout(value: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    rank = getattr(layout, "rank", None)
    require(rank in (None, value.data.ndim), f"a layout of {rank} axes for {list(value.shape)}")
    return Tensor(value.data, value.dtype, layout)


def reshape(value: Tensor, *shape: Any) -> Tensor:
    return value.reshape(*shape)


def permute(value: Tensor, *order: Any) -> Tensor:
    return value.permute(*order)


def expand_dims(value: Tensor, axis: int) -> Tensor:
    keys = [slice(None)] * value.data.ndim
    keys.insert(axis % (value.data.ndim + 1), None)
    return value[tuple(keys)]


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.split()


def join(left: Tensor, right: Tensor) -> Tensor:
    require(left.dtype == right.dtype, f"join of {left.dtype} and {right.dtype}")
    return Tensor(torch.stack([left.data, right.data], dim=-1), left.dtype)


def broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return tuple(Tensor(t.data.expand(shape), t.dtype, t._layout) for t in (left, right))


def where(condition: Tensor, left: Any, right: Any) -> Tensor:
    require(scalar(condition).dtype == tl.int1, "where() by numbers that are not conditions")
    # Either branch alone gives its dtype to a number of Python.
    chosen = binary(lambda a, b: torch.where(scalar(condition).data, a, b), left, right)
    return Tensor(chosen.data, chosen.dtype, condition._layout)


def _numbers(function: Callable) -> Callable:
    def elementwise(value: Any) -> Tensor:
        value = scalar(value)
        require(value.dtype == tl.float32, f"{function.__name__} of {value.dtype}, not of fp32")
        return Tensor(function(value.data), value.dtype, value._layout)

    return elementwise


exp = _numbers(torch.exp)
exp2 = _numbers(torch.exp2)
log = _numbers(torch.log)
log2 = _numbers(torch.log2)
sqrt = _numbers(torch.sqrt)
rsqrt = _numbers(torch.rsqrt)


def abs(value: Tensor) -> Tensor:
    return Tensor(value.data.abs(), value.dtype, value._layout)


def maximum(left: Any, right: Any) -> Tensor:
    """A NaN beside a number is not seen, as on a GPU."""
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return builtins.max(left, right)
    return binary(torch.fmax, left, right)


def minimum(left: Any, right: Any) -> Tensor:
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return builtins.min(left, right)
    return binary(torch.fmin, left, right)


def fma(left: Tensor, right: Tensor, addend: Tensor) -> Tensor:
    return left * right + addend


def _reduced(value: Tensor, data: torch.Tensor, dtype: Any, axis: int | None, keep_dims: bool) -> Tensor:
    if keep_dims or data.ndim == 0:
        return Tensor(data, dtype, value._layout if keep_dims else None)
    return Tensor(data, dtype, SliceLayout(axis % value.data.ndim, value.layout))


def sum(value: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
    axes = tuple(range(value.data.ndim)) if axis is None else axis
    dtype = value.dtype if value.dtype.is_floating() else common(value.dtype, tl.int32)
    data = wrapped(value.data, dtype).sum(axes, keepdim=keep_dims, dtype=COMPUTED[dtype])
    return _reduced(value, wrapped(data, dtype), dtype, axis, keep_dims)


def _extreme(value: Tensor, axis: int | None, keep_dims: bool, function: Callable, least: float) -> Tensor:
    """NaN only where there is nothing else."""
    data, axes = value.data, tuple(range(value.data.ndim)) if axis is None else axis
    if value.dtype.is_floating() and bool(data.isnan().any()):
        nothing = data.isnan().all(axes, keepdim=keep_dims) if axis is not None else data.isnan().all()
        data = function(data.masked_fill(data.isnan(), least), axes, keepdim=keep_dims)
        data = data.masked_fill(nothing, float("nan"))
    else:
        data = function(data, axes, keepdim=keep_dims)
    return _reduced(value, data, value.dtype, axis, keep_dims)


def max(value: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
    return _extreme(value, axis, keep_dims, torch.amax, float("-inf"))


def min(value: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
    return _extreme(value, axis, keep_dims, torch.amin, float("inf"))
