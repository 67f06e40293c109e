"""Kernels to try compiling ahead of time on; run as a program, it prints what each takes of a multiprocessor.

A program of its own: kernels that are imported where Triton interprets cannot be compiled, and other tests interpret.
"""

import json
import sys

import triton
import triton.language as tl

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


TYPES = {"source": "*fp32", "target": "*fp32"}
SAMPLES = [
    Variant("fits", _sum, {"source": "*bf16", "target": "*fp32", "tokens": "i32"}, {"BLOCK": 64}, num_warps=1),
    Variant("spills", _scaled, TYPES, {"SIZE": 8192}, num_warps=1),
    Variant("fills shared memory", _product, {**TYPES, "source": "*fp16", "steps": "i32"}, {"SIZE": 64}, num_stages=8),
    Variant("does not compile", _mismatched, {"source": "*fp32"}, {"BLOCK": 16}),
    Variant("lacks an argument", _sum, TYPES, {"BLOCK": 64}),
]


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for row in check("sample_kernels", [(sample, architecture) for sample in SAMPLES]):
            print(json.dumps(row))
