"""Whether Triton kernels can run, without an import of Triton."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor


_INSTALLED = find_spec("triton") is not None  # looked up once, where no tracer sees it


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _INSTALLED


def interprets() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors: a means of tests, slow."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: CUDA, or the CPU under the interpreter."""
    return (device.type == "cuda" or (device.type == "cpu" and interprets())) and has_triton()


def check_device(name: str, tensor: Tensor) -> None:
    """ValueError unless kernels run where `tensor` is."""
    if not runs_on(tensor.device):
        needed = "CUDA" if has_triton() else "CUDA, with Triton installed"
        raise ValueError(f"{name} is on {tensor.device}; allowed: {needed} (or the CPU under TRITON_INTERPRET=1)")


def launch_device(device: torch.device) -> AbstractContextManager:
    """A context in which Triton launches on `device`; it takes the current one, whatever holds its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
