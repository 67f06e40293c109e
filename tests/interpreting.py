"""A process in which Triton interprets kernels on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from unittest import mock

import torch


@contextmanager
def interpreting_process() -> Iterator[Callable]:
    """`run(function, *args)` in a process of its own: whether Triton interprets is settled when it is imported."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore"):
            pool.submit(start).result()
        yield lambda function, *args: pool.submit(function, *args).result()


def start() -> None:
    """One thread; and loops up to a number that a kernel was given, which Triton 3.6 cannot interpret with NumPy 2.4:
    it makes an int of an array of one number and one dimension."""
    torch.set_num_threads(1)
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: type, *scope: object) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
