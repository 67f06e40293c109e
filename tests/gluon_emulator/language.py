"""`gluon.language`: what kernels find under `gl`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as real

from .assembly import inline_asm_elementwise
from .memory import load, store
from .operations import (
    abs,
    arange,
    broadcast,
    convert_layout,
    exp,
    exp2,
    expand_dims,
    fma,
    full,
    join,
    log,
    log2,
    max,
    maximum,
    min,
    minimum,
    permute,
    reshape,
    rsqrt,
    split,
    sqrt,
    sum,
    where,
    zeros,
)
from .program import program
from .shared import View as shared_memory_descriptor
from .shared import allocate_shared_memory
from .values import Tensor, scalar
from .values import Tensor as tensor


__all__ = [
    "abs",
    "allocate_shared_memory",
    "arange",
    "barrier",
    "broadcast",
    "cdiv",
    "constexpr",
    "convert_layout",
    "device_assert",
    "exp",
    "exp2",
    "expand_dims",
    "fma",
    "full",
    "inline_asm_elementwise",
    "join",
    "load",
    "log",
    "log2",
    "max",
    "maximum",
    "min",
    "minimum",
    "num_programs",
    "num_warps",
    "permute",
    "program_id",
    "reshape",
    "rsqrt",
    "shared_memory_descriptor",
    "split",
    "sqrt",
    "static_assert",
    "static_range",
    "store",
    "sum",
    "tensor",
    "to_tensor",
    "warp_specialize",
    "where",
    "zeros",
]

DTYPES = ("float16", "bfloat16", "float32", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
LAYOUTS = (
    *("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"),
    *("SliceLayout", "SwizzledSharedLayout"),
)


def __getattr__(name: str) -> Any:
    if name in LAYOUTS:
        return getattr(real, name)
    if name in DTYPES:
        return getattr(tl, name)
    raise AttributeError(f"the emulator has no gluon.language.{name}: see tests/gluon_emulator")


class constexpr:
    """Stands in annotations."""

    def __new__(cls, value: Any) -> Any:
        return value


static_range = range


def number_range(*bounds: Any) -> Iterator[Tensor]:
    """`range` in a kernel: its numbers are scalars."""
    return (scalar(number) for number in builtins.range(*map(int, bounds)))


def program_id(axis: int) -> Tensor:
    return scalar(program().place[axis])


def num_programs(axis: int) -> Tensor:
    return scalar(program().grid[axis])


def num_warps() -> int:
    return program().num_warps


def to_tensor(value: Any) -> Tensor:
    return scalar(value)


def cdiv(left: Any, right: Any) -> Any:
    return (left + right - 1) // right


def static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    assert bool(condition.data.all()), message


def barrier(*, cluster: bool = False) -> None:
    """A group of warps is one thread here: its warps are always together."""


def warp_specialize(
    functions_and_args: list[tuple[Callable, tuple]], worker_num_warps: list[int], worker_num_regs: Any = None
) -> Any:
    workers = len(functions_and_args) - 1
    for given in (worker_num_warps, worker_num_regs):
        if given is not None and len(given) != workers:
            raise ValueError(f"{len(given)} numbers {given} for {workers} workers")
    return program().run(functions_and_args)
