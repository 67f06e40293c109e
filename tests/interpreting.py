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
            pool.submit(torch.set_num_threads, 1).result()  # starts it
        yield lambda function, *args: pool.submit(function, *args).result()
