"""A process in which Gluon is emulated."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from types import ModuleType
from unittest import mock

from . import install


@contextmanager
def emulating_process() -> Iterator[Callable]:
    """`run(function, *args)` in a process of its own: which Gluon a kernel has is settled when it is imported."""
    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):
        pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=start)
        pool.submit(int).result()
    with pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def start() -> None:
    """One thread; NaN in memory that nobody wrote; of the package what kernels import, a third of the time."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if "hf_wsvd" not in sys.modules:
        package = ModuleType("hf_wsvd")
        package.__path__ = list(find_spec("hf_wsvd").submodule_search_locations)
        sys.modules["hf_wsvd"] = package
    install()
