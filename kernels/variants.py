"""What one compiled form of a kernel is: for compiling ahead of time, with no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


ARCHITECTURES = (80, 89, 90, 100, 120)


class Variant(NamedTuple):
    """A kernel with its argument types, constants and launch options. A kernel module lists its own in `variants()`.

    Attributes:
        name: unique in its module, such as "float16 rank 64 head_dim 128".
        kernel: the `@triton.jit` or `@gluon.jit` function.
        signature: type of every argument that is not a constant, by name: "*bf16", "*u8", "*i8", "*fp32", "i32",
            "i64", "fp32", ... ("*" for a pointer); of a tensor descriptor in Gluon that the host makes, its shape in
            shared memory and layout: "tensordesc<bf16[128, 64],NVMMASharedLayout(...)>".
        constexprs: value of every `tl.constexpr` argument, by name. None for an argument without a value.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
        divisible: arguments (pointers and whole numbers) known at launch to be multiples of 16, by name; None for all
            pointers, as torch allocates them.
        architectures: compute capabilities on which it is launched.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] | None = None
    architectures: tuple[int, ...] = ARCHITECTURES
