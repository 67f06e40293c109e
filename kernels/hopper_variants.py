"""Forms of the Hopper kernels for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .hopper_form import PADDED_RANKS, TILE_TOKENS, Form, Side, tile_constants
from .hopper_launch import kernel_named
from .hopper_operands import HEAD_DIMS, shared_layout
from .tile_table import load, nearest
from .tiles import SHIPPED, TILES, AnyTile, PositionQueryTile, TileReconstructionTile
from .variants import Variant


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.uint32: "u32"}
CODES = ((16, 0), (8, 1), (8, 2), (4, 1), (4, 2))  # bits, numbers of a scale
WHOLE_NUMBERS = (
    *("slots", "first", "split_tokens", "splits", "key_width", "value_width", "query_batch_stride"),
    *("query_head_stride", "up_head_stride", "up_channel_stride", "mask_batch_stride", "key_batch_rows"),
    *("key_head_rows", "value_batch_rows", "value_head_rows", "rows_batch_rows"),
)


def variants() -> Iterator[Variant]:
    """Both kernels in every form of keys and values alike, and in some that differ; all groups of warps and chunks.

    Every second one has head numbers, lengths, starts and a mask; none of four groups, which the tables that are
    shipped do not ask for: with those, Triton 3.6 has them put a few numbers aside in every tile.
    """
    for number, (kernel, form, dtype, tile) in enumerate([*position_query_forms(), *tile_reconstruction_forms()]):
        yield variant(kernel, form, dtype, tile, number % 2 == 1 and getattr(tile, "groups", 2) < 4)


Listed = tuple[str, Form, torch.dtype, AnyTile]


def position_query_forms() -> Iterator[Listed]:
    """Forms, dtypes and tiles of the position-query kernel."""
    kernel = "position_query"
    for head_dim, rank, code in product(HEAD_DIMS, PADDED_RANKS, CODES):
        side = Side(rank, *code)
        yield kernel, Form(head_dim, side, side), torch.bfloat16, shipped(kernel, side)
        if code[0] == 16 or (rank, head_dim) == (64, 128):
            yield kernel, Form(head_dim, side, side), torch.float16, shipped(kernel, side)
    for key, value in zip(CODES, (*CODES[1:], CODES[0])):
        form = Form(128, Side(64, *key), Side(128, *value))
        yield kernel, form, torch.bfloat16, PositionQueryTile(8, 1)


def tile_reconstruction_forms() -> Iterator[Listed]:
    """The same of the tile-reconstruction kernel."""
    kernel = "tile_reconstruction"
    for head_dim, rank, code in product(HEAD_DIMS, PADDED_RANKS, CODES):
        side = Side(rank, *code)
        yield kernel, Form(head_dim, side, side, 4), torch.bfloat16, shipped(kernel, side)
        if code[0] == 16:
            yield kernel, Form(head_dim, side, side, 7), torch.float16, shipped(kernel, side)
    for number, code in enumerate(CODES):
        side, other = Side(64, *code), Side(128, *CODES[number - 1])
        for groups, chunk in ((2, 64), (2, 32), (3, 32), (4, 32))[: 4 if code[0] == 16 else 3]:
            tile = TileReconstructionTile(8, 2 if groups == 4 else 1, 512, groups, chunk)
            yield kernel, Form(128, side, side, 4), torch.bfloat16, tile
        for form in (
            Form(128, side, side, 7, bias=True),
            Form(128, side, side, 16, bias=True, norm=1),
            Form(128, side, side, 4, norm=2),
            Form(128, side, other, 16, bias=True, norm=1),
            Form(128, other, side, 4),
        ):
            yield kernel, form, torch.bfloat16, TileReconstructionTile(8, 1, 512, 3, 64)


def shipped(kernel: str, side: Side) -> AnyTile:
    """The tile of the shipped table for keys of a form."""
    operands = {"head_dim": 128, "bits": side.bits, "code": None, "key_rank": side.width, "value_rank": side.width}
    found = nearest(load(SHIPPED / "default.json"), kernel, {**operands, "group": 1, "tokens": 8192, "rows": 32})
    return TILES[kernel](**found.sizes)


def variant(kernel: str, form: Form, dtype: torch.dtype, tile: AnyTile, optional: bool) -> Variant:
    """One form; `optional`: with the arguments that may be None."""
    tokens, ranks = TILE_TOKENS[kernel], form.ranks(kernel)
    signature: dict[str, str] = {}
    for name, side, rank in zip(("key", "value"), (form.key, form.value), ranks):
        kind = dtype if side.bits == 16 else torch.uint8
        signature[name] = descriptor(kind, (tokens, rank // 2 if side.bits == 4 else rank))
        numbers = {0: kind, 1: torch.float16, 2: torch.uint32}[side.scales]
        signature[f"{name}_scales"] = descriptor(numbers, (tokens,))
    signature |= {
        **dict.fromkeys(("cos", "sin"), descriptor(dtype, (tokens, form.head_dim // 2))),
        **dict.fromkeys(("query", "key_up"), f"*{TYPES[dtype]}"),
        **dict.fromkeys(("partial", "lse"), "*fp32"),
        "scale": "fp32",
        **dict.fromkeys(WHOLE_NUMBERS, "i32"),
    }
    constants: dict[str, Any] = form.constants(kernel) | tile_constants(kernel, form, tile, tile.heads)
    present = {"heads": optional, "lengths": optional, "starts": optional, "mask": optional}
    kinds = {"heads": "*i32", "lengths": "*i32", "starts": "*i32", "mask": "*u8"}
    if kernel == "tile_reconstruction":
        signature |= {"bias_head_stride": "i32", "norm_epsilon": "fp32"}
        present |= {"key_bias": form.bias, "norm_weight": form.norm > 0}
        kinds |= {"key_bias": f"*{TYPES[dtype]}", "norm_weight": "*fp32"}
    signature |= {name: kinds[name] for name, there in present.items() if there}
    constants |= {name: None for name, there in present.items() if not there}
    words = [f"{TYPES[dtype]} head_dim {form.head_dim}", *map(_described, (form.key, form.value))]
    words += [f"group {form.group}", *(["bias"] if form.bias else []), *([f"norm {form.norm}"] if form.norm else [])]
    words += [f"{field} {value}" for field, value in tile._asdict().items()]
    return Variant(
        f"{kernel} {', '.join(words)}", kernel_named(kernel), signature, constants, divisible=None, architectures=(90,)
    )


def _described(side: Side) -> str:
    return f"rank {side.width} in {side.bits} bits" + (f" scaled by {side.scales}" if side.scales else "")


def descriptor(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    """The type of a descriptor that the host makes."""
    layout: gl.NVMMASharedLayout = shared_layout(dtype, block)
    return f"tensordesc<{TYPES[dtype]}{list(block)},{layout!r}>"
