"""The emulator of Gluon runs a right kernel as a GPU would, and tells what is wrong with a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch


pytest.importorskip("triton", minversion="3.6")

import faulty_kernels


FAULTS = {
    "refills without waiting": "RaceError.*write by copies to full.* of stages.*not ordered after the (read|write)",
    "waits for room first": "DeadlockError.*multiply.*parity 0 of full.*bring.*parity 0 of free",
    "announces too few bytes": "KernelError.*16 bytes more than announced came to full",
    "announces too many bytes": "DeadlockError.*16 bytes missing",
    "copies from no multiple of 16 bytes": r"KernelError.*source\[0, 4\] does not start at a multiple of 16 bytes",
    "reads beyond a tensor": r"KernelError.*weight\[16..271\] of 256 numbers",
    "multiplies by nothing": "KernelError.*weights.* is read before it was written",
    "multiplies by what no fence is behind": "RaceError.*weights.*no fence_async_shared behind the write by multiply",
    "reads without waiting": "RaceError.*read by multiply.* of stages.*not ordered after the write by copies to full",
    "waits for the wrong phase": "DeadlockError.*multiply.*parity 1 of full.*bring.*parity 0 of free",
    "releases before it reads": "RaceError.*stages.*not ordered after the read by multiply",
    "releases without a fence": "RaceError.*stages.*no fence_async_shared behind the read by multiply",
    "releases nothing": "DeadlockError.*multiply.*of full.*bring.*of free",
    "releases twice": "KernelError.*2 arrive at free.*which waits for 1",
    "changes an operand of a product": "RaceError.*write by multiply.* of weights.*while a product may still take",
    "uses a sum at once": "KernelError.*read before warpgroup_mma_wait",
    "stores where another program does": r"RaceError.*target\[0\] was written by another partition",
    "keeps no operand in registers": "KernelError.*not among the deps",
}


def test_a_right_kernel(emulated: Callable):
    found, wanted = emulated(faulty_kernels.sum_of_products, None)
    assert found == wanted


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_place(fault, emulated: Callable):
    assert re.search(FAULTS[fault], emulated(faulty_kernels.error_of, fault))


def test_instructions_of_inline_assembly(emulated: Callable):
    for found, wanted in emulated(faulty_kernels.instructions).values():
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
