"""Operators of tensors in registers, with the promotion of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from .errors import require
from .values import COMPUTED, Tensor, scalar, wrapped


def common(left: Any, right: Any) -> Any:
    """The dtype of a result: floats before whole numbers, then the wider, then unsigned; of two 16-bit floats fp32."""
    if left == right:
        return left
    if left.is_floating() != right.is_floating():
        return left if left.is_floating() else right
    if left.is_floating():
        return tl.float32
    width = left.primitive_bitwidth - right.primitive_bitwidth
    return left if width > 0 or (width == 0 and left.is_int_unsigned()) else right


def beside(number: bool | int | float, dtype: Any) -> Any:
    """The dtype of a result for a number of Python beside a tensor of `dtype`."""
    if dtype.is_floating():
        return dtype
    if isinstance(number, float):
        return tl.float32
    if dtype == tl.int1:
        return dtype if isinstance(number, bool) else tl.int32
    width = dtype.primitive_bitwidth
    lowest, highest = (0, 2**width) if dtype.is_int_unsigned() else (-(2 ** (width - 1)), 2 ** (width - 1))
    require(lowest <= number < highest, f"{number} is no {dtype}")
    return dtype


def promoted(left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """Both operands in their common dtype, that dtype and a layout."""
    if not isinstance(left, Tensor):
        b, a, dtype, layout = promoted(scalar(right), left)
        return a, b, dtype, layout
    if not isinstance(right, Tensor):
        dtype = beside(right, left.dtype)
        return wrapped(left.data, dtype), torch.tensor(right, dtype=COMPUTED[dtype]), dtype, left._layout
    a, b = left.data, right.data
    require(
        a.ndim == b.ndim or 0 in (a.ndim, b.ndim), f"{list(a.shape)} and {list(b.shape)} have other numbers of axes"
    )
    dtype = common(left.dtype, right.dtype)
    return wrapped(a, dtype), wrapped(b, dtype), dtype, left._layout if a.ndim >= b.ndim else right._layout


def binary(function: Callable, left: Any, right: Any, comparing: bool = False) -> Tensor:
    a, b, dtype, layout = promoted(left, right)
    try:
        out = function(a, b)
    except RuntimeError as error:
        require(False, f"{list(a.shape)} and {list(b.shape)}: {error}")
    return Tensor(out, tl.int1, layout) if comparing else Tensor(wrapped(out, dtype), dtype, layout)


def divide(left: Any, right: Any) -> Tensor:
    a, b, _, layout = promoted(left, right)
    return Tensor(a.to(torch.float32) / b.to(torch.float32), tl.float32, layout)


def whole_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As on a GPU: towards zero."""
    return torch.div(a, b, rounding_mode="trunc")


def shifted_right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    require(bool((b >= 0).all()), "shift by a negative number")
    return a >> b


OPERATORS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "floordiv": whole_quotient,
    "mod": torch.fmod,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": shifted_right,
}
COMPARISONS = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne}


def _give(name: str, operator: Callable) -> None:
    setattr(Tensor, f"__{name}__", operator)


def _turned(operator: Callable) -> Callable:
    return lambda self, other: operator(other, self)


def _operator(function: Callable, comparing: bool = False) -> Callable:
    def operator(left: Any, right: Any) -> Any:
        if not isinstance(left, (Tensor, bool, int, float)) or not isinstance(right, (Tensor, bool, int, float)):
            return NotImplemented
        return binary(function, left, right, comparing)

    return operator


for _name, _function in OPERATORS.items():
    _give(_name, _operator(_function))
    _give(f"r{_name}", _turned(_operator(_function)))
for _name, _function in COMPARISONS.items():
    _give(_name, _operator(_function, comparing=True))
_give("truediv", divide)
_give("rtruediv", _turned(divide))
