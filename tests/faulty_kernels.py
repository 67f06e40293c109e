"""A small kernel with one fault or none, to try the emulator of Gluon on; run in a process where it is installed."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_wsvd.kernels import hopper_codes


copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def add_products(source, weight, target, tiles, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """`target [64, 16]`: the sum over tiles `[64, 16]` of source of tile times weight `[16, 16]`."""
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 16], source.layout)
    WEIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float16)
    weights = gl.allocate_shared_memory(gl.float16, [16, 16], WEIGHT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (multiply, (stages, weights, full, free, weight, target, tiles, STAGES, FAULT)),
            (bring, (source, stages, full, free, tiles, STAGES, FAULT)),
        ],
        [1],
        [24],
    )


@gluon.jit
def bring(source, stages, full, free, tiles, STAGES: gl.constexpr, FAULT: gl.constexpr):
    for tile in range(tiles):
        stage = tile % STAGES
        if FAULT != "refills without waiting":
            phase = (tile // STAGES) & 1
            mbarrier.wait(free.index(stage), phase if FAULT == "waits for room first" else phase ^ 1)
        nbytes = source.block_type.nbytes
        if FAULT == "announces too few bytes":
            nbytes -= 16
        if FAULT == "announces too many bytes":
            nbytes += 16
        mbarrier.expect(full.index(stage), nbytes)
        column = 4 if FAULT == "copies from no multiple of 16 bytes" else 0
        copy_tile(source, [tile * 64, column], full.index(stage), stages.index(stage))


@gluon.jit
def multiply(stages, weights, full, free, weight, target, tiles, STAGES: gl.constexpr, FAULT: gl.constexpr):
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    row = gl.arange(0, 16, gl.SliceLayout(1, PLAIN))
    column = gl.arange(0, 16, gl.SliceLayout(0, PLAIN))
    if FAULT == "reads beyond a tensor":
        row += 1
    if FAULT != "multiplies by nothing":
        weights.store(gl.load(weight + row[:, None] * 16 + column[None, :]))
    if FAULT != "multiplies by what no fence is behind":
        fence_async_shared()
    total = gl.zeros([64, 16], gl.float32, SUM)
    for tile in range(tiles):
        stage = tile % STAGES
        if FAULT != "reads without waiting":
            mbarrier.wait(
                full.index(stage), ((tile // STAGES) & 1) ^ (1 if FAULT == "waits for the wrong phase" else 0)
            )
        if FAULT == "releases before it reads":
            mbarrier.arrive(free.index(stage), count=1)
        left = stages.index(stage).load(LEFT)
        total = warpgroup_mma(left, weights, total, is_async=True)
        if FAULT == "changes an operand of a product":
            weights.store(gl.zeros([16, 16], gl.float16, PLAIN))
        if FAULT == "uses a sum at once":
            total += 0.0
        if FAULT == "keeps no operand in registers":
            total = warpgroup_mma_wait(0, deps=[total])
        else:
            total, left = warpgroup_mma_wait(0, deps=[total, left])
        if FAULT != "releases without a fence":
            fence_async_shared()
        if FAULT not in ("releases before it reads", "releases nothing"):
            mbarrier.arrive(free.index(stage), count=2 if FAULT == "releases twice" else 1)
    row = gl.arange(0, 64, gl.SliceLayout(1, SUM))
    column = gl.arange(0, 16, gl.SliceLayout(0, SUM))
    gl.store(target + row[:, None] * 16 + column[None, :], total)


def sum_of_products(fault: str | None) -> tuple[list, list]:
    """What the kernel gives and what it should, over 300 rows of 8 numbers: boxes reach beyond both axes."""
    source, weight = torch.randint(-3, 4, (300, 8)).half(), torch.randint(-3, 4, (16, 16)).half()
    layout = gl.NVMMASharedLayout.get_default_for([64, 16], gl.float16)
    target = torch.empty(64, 16)
    programs = 2 if fault == "stores where another program does" else 1
    descriptor = TensorDescriptor(source, [300, 8], [8, 1], [64, 16], layout)
    add_products[(programs,)](descriptor, weight, target, 5, STAGES=2, FAULT=fault)
    padded = torch.nn.functional.pad(source.float(), (0, 8, 0, 20)).unflatten(0, (5, 64))
    return target.tolist(), (padded.sum(0) @ weight.float()).tolist()


def error_of(fault: str) -> str:
    """The error that a fault leads to, in words."""
    try:
        sum_of_products(fault)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def instructions() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What inline assembly makes of all bytes and of all 16-bit numbers, and what it should."""
    from gluon_emulator.values import Tensor

    numbers = torch.arange(256)
    codes = Tensor(numbers.to(torch.uint8), gl.uint8)
    low, high = hopper_codes.raised_nibbles(codes)
    signed = numbers.to(torch.uint8).view(torch.int8).int()
    floats = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    pairs = {
        "low nibbles": (low, 128 + numbers % 16),
        "high nibbles": (high, 128 + numbers // 16),
        "bytes": (hopper_codes.raised_bytes(codes, 2), 32768 + numbers),
        "signed bytes": (hopper_codes.raised_bytes(codes, 1), 32768 + 128 + signed),
        "bfloat16": (hopper_codes.widened(Tensor(floats, gl.bfloat16)), floats),
    }
    return {name: (found.data, wanted.float()) for name, (found, wanted) in pairs.items()}
