"""What a kernel under emulation may do wrong."""

from __future__ import annotations

import sys
from pathlib import Path


FOLDER = str(Path(__file__).parent)


class KernelError(Exception):
    """A kernel did what a GPU does not define, or what no GPU would come back from."""


class RaceError(KernelError):
    """Two accesses to shared memory that nothing orders."""


class DeadlockError(KernelError):
    """All partitions wait."""


def require(condition: bool, message: str) -> None:
    """Raise KernelError with the line of the kernel unless the condition holds."""
    if not condition:
        raise KernelError(f"{kernel_line()}: {message}")


def kernel_line() -> str:
    """File, line and function of the innermost frame outside the emulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
