"""Forms of the Hopper kernels for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from triton.experimental.gluon import language as gl

from .hopper_operands import HEAD_DIMS, RANKS, TILE_TOKENS, shared_layout
from .position_query import position_query_kernel
from .tile_reconstruction import tile_reconstruction_kernel
from .tiles import SHIPPED, load
from .variants import Variant


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.uint32: "u32"}
CODES = ((16, 0), (8, 1), (8, 2), (4, 1), (4, 2))  # bits, numbers of a scale
WHOLE_NUMBERS = (
    *("slots", "first", "split_tokens", "splits", "query_batch_stride", "query_head_stride", "up_head_stride"),
    *("up_channel_stride", "key_batch_rows", "key_head_rows", "value_batch_rows", "value_head_rows"),
    "rows_batch_rows",
)


def variants() -> Iterator[Variant]:
    """Every form of both kernels, as `launch` runs them; with head numbers and lengths in every second one."""
    forms = product((torch.bfloat16, torch.float16), HEAD_DIMS, RANKS, CODES, (2, 1))
    for number, (dtype, head_dim, rank, code, heads) in enumerate(forms):
        name = f"position_query {TYPES[dtype]} head_dim {head_dim} rank {rank} code {code} heads {heads}"
        constants = {"HEADS": heads}
        yield variant(name, position_query_kernel, dtype, head_dim, rank, code, constants, number % 2 == 1)
    for number, (dtype, head_dim, code, group) in enumerate(
        product((torch.bfloat16, torch.float16), HEAD_DIMS, CODES, (4, 7, 16))
    ):
        if dtype == torch.bfloat16 or code[0] == 16:
            name = f"tile_reconstruction {TYPES[dtype]} head_dim {head_dim} code {code} group {group}"
            constants = {"GROUP": group, "QUERIES": 8 if group <= 8 else 16}
            yield variant(name, tile_reconstruction_kernel, dtype, head_dim, 64, code, constants, number % 2 == 1)


def variant(
    name: str,
    kernel: object,
    dtype: torch.dtype,
    head_dim: int,
    rank: int,
    code: tuple[int, int],
    constants: dict[str, int],
    optional: bool,
) -> Variant:
    """One form; `optional`: with the arguments that may be None."""
    bits, scales = code
    width = rank // 2 if bits == 4 else rank
    tokens = descriptor(dtype if bits == 16 else torch.uint8, (TILE_TOKENS, width))
    numbers = descriptor({0: dtype, 1: torch.float16, 2: torch.uint32}[scales], (TILE_TOKENS,))
    rows = descriptor(dtype, (TILE_TOKENS, head_dim // 2))
    signature = {
        **dict.fromkeys(("key", "value"), tokens),
        **dict.fromkeys(("key_scales", "value_scales"), numbers),
        **dict.fromkeys(("cos", "sin"), rows),
        **dict.fromkeys(("query", "key_up"), f"*{TYPES[dtype]}"),
        **dict.fromkeys(("partial", "lse"), "*fp32"),
        "scale": "fp32",
        **dict.fromkeys(WHOLE_NUMBERS, "i32"),
    }
    constexprs = {
        "HEAD_DIM": head_dim,
        "RANK": rank,
        "BITS": bits,
        "SCALES": scales,
        "STAGES": stages(kernel, bits),
        "ROW_STAGES": 1,
        **constants,
    }
    if optional:
        signature |= {"heads": "*i32", "lengths": "*i32"}
    else:
        constexprs |= {"heads": None, "lengths": None}
    return Variant(name, kernel, signature, constexprs, architectures=(90,))


def stages(kernel: object, bits: int) -> int:
    """Stages of the shipped table."""
    name = "position_query" if kernel is position_query_kernel else "tile_reconstruction"
    entries = [entry for entry in load(SHIPPED / "default.json").entries if entry.kernel == name]
    exact = [entry for entry in entries if entry.keys.get("bits") == bits]
    return (exact or entries)[0].sizes["num_stages"]


def descriptor(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    """The type of a descriptor that the host makes."""
    layout: gl.NVMMASharedLayout = shared_layout(dtype, block)
    return f"tensordesc<{TYPES[dtype]}{list(block)},{layout!r}>"
