"""Launches of the Hopper kernels: position queries for heads of their own, tile reconstruction for groups."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .decode_call import DecodeCall
from .hopper_operands import (
    TILE_TOKENS,
    hopper_obstacle,
    operands_obstacle,
    row_strides,
    scale_descriptor,
    token_descriptor,
)
from .stored_tokens import DecodePart
from .tiles import Tile, device_facts, tile_for


# What starting a program costs, in tokens of one head: it prepares its operands and waits for its first tile.
START_TOKENS = 512
SHORTEST_SPLIT = 4 * TILE_TOKENS
HALVES = 2  # of a tile, each with a result of its own
LARGEST_GROUP = 16
GROUP_RANK = 64  # of tile reconstruction
MOST_HEADS = 2  # of a program of position queries


def position_query_obstacle(part: DecodePart, call: DecodeCall) -> str | None:
    """Why the position-query kernel cannot serve a part of a call; None if it can."""
    rows = call.group * call.query.shape[2]
    if rows > 1:
        return f"{rows} query rows share a head"
    return hopper_obstacle(call.query.device) or operands_obstacle(part, call)


def tile_reconstruction_obstacle(part: DecodePart, call: DecodeCall) -> str | None:
    """Why the tile-reconstruction kernel cannot serve a part of a call; None if it can."""
    if call.query.shape[2] > 1:
        return f"{call.query.shape[2]} query tokens, not 1"
    return (
        hopper_obstacle(call.query.device)
        or operands_obstacle(part, call)
        or group_obstacle(call.group, call.query.dtype, part.key.width, part.key.bits)
    )


def group_obstacle(group: int, dtype: torch.dtype, width: int, bits: int) -> str | None:
    """What tile reconstruction asks beyond `form_obstacle`: why not tokens of this form and a query of `dtype`."""
    if not 1 < group <= LARGEST_GROUP:
        return f"{group} query heads a head, not 2 to {LARGEST_GROUP}"
    if width != GROUP_RANK:
        return f"rank {width}, not {GROUP_RANK}"
    if bits < 16 and dtype != torch.bfloat16:
        return "weights times scales can be too small for float16"
    return None


def position_query_decode(part: DecodePart, call: DecodeCall, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """First stage of attention over one part, see `general_decode`; the twin is `decode_part_oracle`.

    Args:
        part, call: without an obstacle.
        tile: how to divide the work; None: as the tile tables say.

    Returns:
        `partial [B, Hp, 1, splits, rank]` and `lse [B, Hp, 1, splits]`, both fp32.

    Raises:
        ValueError: a tile of more heads, other tokens or other warps than the kernel is made for.
    """
    from .position_query import position_query_kernel

    tile = tile or choose_tile("position_query", part, call)
    if tile.heads > MOST_HEADS:
        raise ValueError(f"tile={tile} is not allowed; allowed: heads=1 or {MOST_HEADS}")
    together = tile.heads if part.key.payload.shape[1] % tile.heads == 0 else 1
    return launch(position_query_kernel, part, call, tile, together, HEADS=together)


def tile_reconstruction_decode(part: DecodePart, call: DecodeCall, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """The same for a group of query heads: `[B, Hp group, 1, splits, rank]` and `[B, Hp group, 1, splits]`."""
    from .tile_reconstruction import tile_reconstruction_kernel

    tile = tile or choose_tile("tile_reconstruction", part, call)
    queries = 8 if call.group <= 8 else 16  # columns of a product on tensor cores
    return launch(tile_reconstruction_kernel, part, call, tile, 1, GROUP=call.group, QUERIES=queries)


def choose_tile(kernel: str, part: DecodePart, call: DecodeCall) -> Tile:
    """The entry of the tile tables for a part."""
    return tile_for(
        kernel,
        head_dim=call.query.shape[3],
        key_rank=part.key.width,
        value_rank=part.value.width,
        bits=part.key.bits,
        code=part.key.code,
        group=call.group,
        tokens=part.key.payload.shape[2],
        batch=call.query.shape[0],
        kv_heads=part.key.payload.shape[1],
        device=call.query.device,
    )


def launch(
    kernel: Any, part: DecodePart, call: DecodeCall, tile: Tile, heads_a_program: int, **constants: int
) -> tuple[Tensor, Tensor]:
    """Run one of the two kernels, whose arguments are the same but for some constants.

    The split is theirs to choose (`balanced_split`), not the tile's. Raises ValueError for a tile of other tokens or
    warps than the kernels are made for.
    """
    from .general_launch import head_numbers

    query, key, value, rotation = call.query, part.key, part.value, call.rotation
    if (tile.block_tokens, tile.num_warps) != (TILE_TOKENS, 4):
        raise ValueError(f"tile={tile} is not allowed; allowed: block_tokens={TILE_TOKENS}, num_warps=4")
    heads, slots = key.payload.shape[1:3]
    batch, programs = query.shape[0], heads // heads_a_program
    split_tokens = balanced_split(slots, batch * programs, device_facts(str(query.device))[1])
    splits = math.ceil(slots / split_tokens)
    shape = (batch, heads * call.group, 1, HALVES * splits)
    partial = query.new_empty((*shape, key.width), dtype=torch.float32)
    lse = query.new_empty(shape, dtype=torch.float32)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    kernel[(splits, programs, batch)](
        token_descriptor(key.payload),
        token_descriptor(value.payload),
        scale_descriptor(key),
        scale_descriptor(value),
        token_descriptor(cos),
        token_descriptor(sin),
        query,
        part.key_up,
        None if part.heads is None else head_numbers(part.heads, query.device),
        call.lengths,
        partial,
        lse,
        call.scaling * math.log2(math.e),
        slots,
        part.first,
        split_tokens,
        splits,
        query.stride(0),
        query.stride(1),
        part.key_up.stride(0),
        part.key_up.stride(1),
        *row_strides(key.payload),
        *row_strides(value.payload),
        row_strides(cos)[0],
        HEAD_DIM=query.shape[3],
        RANK=key.width,
        BITS=key.bits,
        SCALES=0 if key.scales is None else key.scales.shape[3],
        STAGES=tile.num_stages,
        ROW_STAGES=1,
        **constants,
        num_warps=4,
        enable_fp_fusion=True,  # the default until Triton 3.9; sums are chains of fused operations
    )
    return partial, lse


@lru_cache(maxsize=4096)
def balanced_split(tokens: int, programs: int, multiprocessors: int) -> int:
    """Tokens of a split, a multiple of a tile, for which the last multiprocessor is done first.

    A program takes a multiprocessor for itself, so that what counts is how many must follow each other.

    Args:
        tokens: of a sequence.
        programs: that there are without splitting.
    """

    def cost(splits: int) -> float:
        waves = math.ceil(programs * splits / multiprocessors)
        return waves * (math.ceil(tokens / splits / TILE_TOKENS) * TILE_TOKENS + START_TOKENS)

    most = max(1, min(tokens // SHORTEST_SPLIT, 4 * multiprocessors))
    splits = min(range(1, most + 1), key=cost)
    return math.ceil(tokens / splits / TILE_TOKENS) * TILE_TOKENS
