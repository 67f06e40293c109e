"""`@gluon.jit` and launches of kernels over a grid."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .errors import KernelError
from .hopper import Descriptor
from .language import number_range
from .memory import Memory, Pointer
from .program import Program, present
from .values import Tensor, scalar


OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}


class Kernel:
    """A kernel or a device function."""

    def __init__(self, function: Callable) -> None:
        self.fn, self.__name__ = function, function.__name__
        self.signature = inspect.signature(function)
        function.__globals__["range"] = number_range

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.fn(*args, **keywords)

    def __get__(self, instance: Any, owner: type) -> Any:
        """As a method of an aggregate."""
        return self if instance is None else partial(self.fn, instance)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return lambda *args, **keywords: self.launch(grid, *args, **keywords)

    def launch(self, grid: tuple[int, ...], *args: Any, **keywords: Any) -> None:
        """Run all programs, one after the other."""
        options = {name: keywords.pop(name) for name in OPTIONS & keywords.keys()}
        bound = self.signature.bind(*args, **keywords)
        bound.apply_defaults()
        arguments = {name: self._argument(name, value) for name, value in bound.arguments.items()}
        sizes = (*grid, 1, 1)[:3]
        for z, y, x in itertools.product(*map(range, reversed(sizes))):
            present.program = Program((x, y, z), sizes, options.get("num_warps", 4))
            try:
                self.fn(**arguments)
                present.program.finish()
            except KernelError as error:
                raise type(error)(f"{self.__name__}{[x, y, z]} of {list(sizes)}: {error}") from error
            finally:
                present.program = None

    def _argument(self, name: str, value: Any) -> Any:
        if "constexpr" in str(self.signature.parameters[name].annotation) or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return Pointer(Memory(name, value), scalar(0))
        if hasattr(value, "block_shape"):
            return Descriptor(name, value)
        return value if isinstance(value, Tensor) else scalar(value)


def jit(function: Callable | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def constexpr_function(function: Callable) -> Callable:
    return function


def aggregate(kind: type) -> type:
    """A class of which kernels make values."""
    return kind
