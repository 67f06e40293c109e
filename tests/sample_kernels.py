"""Kernels to try compiling ahead of time on: one that fits, one that spills, one that does not compile."""

import triton
import triton.language as tl

from hf_wsvd.kernels.variants import Variant


@triton.jit
def _sum(source, target, tokens, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    numbers = tl.load(source + places, mask=places < tokens, other=0.0).to(tl.float32)
    tl.store(target, tl.sum(numbers))


@triton.jit
def _product(source, target, SIZE: tl.constexpr):
    """Keeps `SIZE` squared numbers live over a loop: more than registers hold if it is large."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    left = tl.load(source + places)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for _ in range(4):
        total = tl.dot(left, tl.trans(left), total)
        left = (left * total).to(left.dtype)
    tl.store(target + places, total)


@triton.jit
def _broken(source, BLOCK: tl.constexpr):
    tl.store(source + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


def variants():
    for kind in ("fp16", "bf16"):
        for block in (64, 128):
            constants = {"BLOCK": block}
            types = {"source": f"*{kind}", "target": "*fp32", "tokens": "i32"}
            yield Variant(f"sum {kind} {block}", _sum, types, constants, num_warps=1)


SPILLING = Variant("spilling", _product, {"source": "*fp16", "target": "*fp32"}, {"SIZE": 256}, num_warps=4)
BROKEN = Variant("broken", _broken, {"source": "*fp32"}, {"BLOCK": 16})
