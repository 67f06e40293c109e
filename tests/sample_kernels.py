"""Kernels to try compiling ahead of time on; run as a program, it prints what each takes of a multiprocessor.

A program of its own: kernels that are imported where Triton interprets cannot be compiled, and other tests interpret.
"""

import json
import sys

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from hf_wsvd.kernels.compile_ahead import check
from hf_wsvd.kernels.variants import Variant


@triton.jit
def _sum(source, target, tokens, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    numbers = tl.load(source + places, mask=places < tokens, other=0.0).to(tl.float32)
    tl.store(target, tl.sum(numbers))


@triton.jit
def _scaled(source, target, SIZE: tl.constexpr):
    """All numbers stay live over a reduction: with one warp, a thread has `SIZE / 32` of them."""
    places = tl.arange(0, SIZE)
    numbers = tl.load(source + places)
    tl.store(target + places, numbers * tl.sum(numbers))


@triton.jit
def _product(source, target, steps, SIZE: tl.constexpr):
    """Every stage of its pipeline holds two tiles in shared memory."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(steps):
        left = tl.load(source + 2 * step * SIZE * SIZE + places)
        right = tl.load(source + (2 * step + 1) * SIZE * SIZE + places)
        total = tl.dot(left, right, total)
    tl.store(target + places, total)


@triton.jit
def _mismatched(source, BLOCK: tl.constexpr):
    tl.store(source + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until Triton 3.6


@gluon.jit
def _row_sums(source, target, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """`source` is a tensor descriptor that the host makes."""
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    load_tile(source, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    numbers = tile.load(LAYOUT).to(gl.float32)
    gl.store(target + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.sum(numbers, axis=1))


TYPES = {"source": "*fp32", "target": "*fp32"}
SHARED = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
DESCRIPTOR = {"source": f"tensordesc<bf16[128, 64],{SHARED!r}>", "target": "*fp32"}
ROWS_OF_WARPS = {"ROWS": 128, "LAYOUT": gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])}
SAMPLES = [
    Variant("fits", _sum, {"source": "*bf16", "target": "*fp32", "tokens": "i32"}, {"BLOCK": 64}, num_warps=1),
    Variant("spills", _scaled, TYPES, {"SIZE": 8192}, num_warps=1),
    Variant("fills shared memory", _product, {**TYPES, "source": "*fp16", "steps": "i32"}, {"SIZE": 64}, num_stages=8),
    Variant("does not compile", _mismatched, {"source": "*fp32"}, {"BLOCK": 16}),
    Variant("lacks an argument", _sum, TYPES, {"BLOCK": 64}),
    Variant("Gluon", _row_sums, DESCRIPTOR, ROWS_OF_WARPS, architectures=(90,)),
]


if __name__ == "__main__":
    architectures = [int(argument) for argument in sys.argv[1:]]
    for sample in SAMPLES:
        served = [architecture for architecture in architectures if architecture in sample.architectures]
        for row in check([("sample_kernels", sample, served[0])]):
            print(json.dumps(row))
