"""Whether Triton kernels can run, without an import of Triton."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch import Tensor


OLDEST_TRITON = "3.6"  # the kernels were not tried with an older one


def version_obstacle() -> str | None:
    """Why the Triton that is installed does not run the kernels; None if it does."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        found = version("triton")
    except PackageNotFoundError:  # a build without metadata
        return None
    if Version(found).release < Version(OLDEST_TRITON).release:
        return f"triton {found} is older than {OLDEST_TRITON}"
    return None


_OBSTACLE = version_obstacle()  # looked up once, where no tracer sees it


def has_triton() -> bool:
    """Whether there is a Triton that runs the kernels."""
    return _OBSTACLE is None


def interprets() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors: a means of tests, slow."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_obstacle(device: torch.device) -> str | None:
    """Why no kernel can run on tensors of this device; None: on CUDA, and on the CPU under the interpreter."""
    if device.type != "cuda" and not (device.type == "cpu" and interprets()):
        return f"tensors are on {device.type}"
    return _OBSTACLE


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    return triton_obstacle(device) is None


def allowed_devices() -> str:
    """Where kernels run, in words."""
    return ("CUDA" if has_triton() else "CUDA, with Triton installed") + " (or the CPU under TRITON_INTERPRET=1)"


def check_device(name: str, tensor: Tensor) -> None:
    """ValueError unless kernels run where `tensor` is."""
    if not runs_on(tensor.device):
        raise ValueError(f"{name} is on {tensor.device}; allowed: {allowed_devices()}")


def launch_device(device: torch.device) -> AbstractContextManager:
    """A context in which Triton launches on `device`; it takes the current one, whatever holds its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
