"""Two kernels to compare with: a plain split-K decode over dense keys and values, and the method of WSVD's own kernel.

Both in the form that is common for them; a few tile sizes are tried and the fastest counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_wsvd.evaluate.decode_operands import ROPE_BASE, Operands


class Tile(NamedTuple):
    """Tokens of a step of the loop and of a program, and warps."""

    block: int
    split: int
    warps: int


DENSE_TILES = [Tile(block, split, 4) for block in (64, 128) for split in (512, 2048)]
WSVD_TILES = [Tile(block, split, warps) for block, warps in ((32, 4), (64, 4), (128, 8)) for split in (512, 2048)]
ROWS = 16  # the fewest that a product on tensor cores takes


@triton.jit
def _dense_split(
    query,
    key,
    value,
    partial,
    lse,
    scaling,
    tokens,
    split_tokens,
    group,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One KV head's query heads against one split. Scores are in base 2; `partial` is normalised."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = tl.num_programs(0)
    rows, channels, lanes = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK)
    row_offsets = (head * group + rows)[:, None] * HEAD_DIM + channels[None, :]
    real = (rows < group)[:, None]
    queries = tl.load(query + row_offsets, mask=real, other=0.0)
    first = split * split_tokens
    end = tl.minimum(first + split_tokens, tokens)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for start in range(first, end, BLOCK):
        places = start + lanes
        offsets = (head * tokens + places)[:, None] * HEAD_DIM + channels[None, :]
        inside = (places < end)[:, None]
        keys = tl.load(key + offsets, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scaling
        scores = tl.where((places < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(best - higher)
        values = tl.load(value + offsets, mask=inside, other=0.0)
        total = total * kept + tl.sum(weights, 1)
        result = tl.dot(weights.to(values.dtype), values, result * kept[:, None])
        best = higher
    places_of_rows = (head * group + rows) * splits + split
    tl.store(lse + places_of_rows, best + tl.log2(total), mask=rows < group)
    tl.store(partial + places_of_rows[:, None] * HEAD_DIM + channels[None, :], result / total[:, None], mask=real)


@triton.jit
def _wsvd_split(
    query,
    key,
    value,
    key_scales,
    value_scales,
    key_up,
    partial,
    lse,
    scaling,
    exponent,
    tokens,
    split_tokens,
    query_heads,
    group,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query head against one split: rebuild the tile of keys, rotate it by angles computed here, multiply and sum.

    Values stay in rank space. `exponent` is the base-2 logarithm of what one frequency is of the one before.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = tl.num_programs(0)
    head = row // query_heads * (query_heads // group) + row % query_heads // group
    layer_head = row % query_heads // group
    HALF: tl.constexpr = HEAD_DIM // 2
    ranks, pairs, lanes = tl.arange(0, RANK), tl.arange(0, HALF), tl.arange(0, BLOCK)
    up_offsets = layer_head * HEAD_DIM * RANK + pairs[None, :] * RANK + ranks[:, None]
    up_first, up_second = tl.load(key_up + up_offsets), tl.load(key_up + up_offsets + HALF * RANK)
    query_first = tl.load(query + row * HEAD_DIM + pairs).to(tl.float32) * scaling
    query_second = tl.load(query + row * HEAD_DIM + HALF + pairs).to(tl.float32) * scaling
    frequencies = tl.exp2(pairs.to(tl.float32) * exponent)
    first = split * split_tokens
    end = tl.minimum(first + split_tokens, tokens)
    best, total = float("-inf"), 0.0
    result = tl.zeros((RANK,), tl.float32)
    for start in range(first, end, BLOCK):
        places = start + lanes
        offsets = (head * tokens + places)[:, None] * RANK + ranks[None, :]
        inside = (places < end)[:, None]
        latents = tl.load(key + offsets, mask=inside, other=0.0).to(up_first.dtype)
        keys_first, keys_second = tl.dot(latents, up_first), tl.dot(latents, up_second)
        angles = places.to(tl.float32)[:, None] * frequencies[None, :]
        cos, sin = tl.cos(angles), tl.sin(angles)
        turned = query_first[None, :] * (keys_first * cos - keys_second * sin)
        turned += query_second[None, :] * (keys_second * cos + keys_first * sin)
        scores = tl.sum(turned, 1)
        if key_scales is not None:
            scores *= tl.load(key_scales + head * tokens + places, mask=places < end, other=0.0).to(tl.float32)
        scores = tl.where(places < end, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        weights = tl.exp2(scores - higher)
        kept = tl.exp2(best - higher)
        total = total * kept + tl.sum(weights, 0)
        if value_scales is not None:
            weights *= tl.load(value_scales + head * tokens + places, mask=places < end, other=0.0).to(tl.float32)
        values = tl.load(value + offsets, mask=inside, other=0.0).to(tl.float32)
        result = result * kept + tl.sum(weights[:, None] * values, 0)
        best = higher
    tl.store(lse + row * splits + split, best + tl.log2(total))
    tl.store(partial + (row * splits + split) * RANK + ranks, result / total)


@triton.jit
def _merge(partial, lse, out, splits, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    lanes, channels = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    inside = lanes < splits
    logarithms = tl.load(lse + row * splits + lanes, mask=inside, other=float("-inf"))
    weights = tl.exp2(logarithms - tl.max(logarithms, 0))
    offsets = (row * splits + lanes)[:, None] * WIDTH + channels[None, :]
    parts = tl.load(partial + offsets, mask=inside[:, None], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * WIDTH + channels, result.to(out.dtype.element_ty))


def dense_split_k(query: Tensor, key: Tensor, value: Tensor, scaling: float, tile: Tile) -> Tensor:
    """Attention of one query token `[B, Hq, 1, D]` over contiguous `[B, H, L, D]`, D a power of two; `[B, Hq, 1, D]`.

    Up to 16 query heads a KV head.
    """
    batch, heads, tokens, head_dim = key.shape
    group = query.shape[1] // heads
    splits = triton.cdiv(tokens, tile.split)
    partial = query.new_empty((batch * heads * group, splits, head_dim), dtype=torch.float32)
    lse = query.new_empty((batch * heads * group, splits), dtype=torch.float32)
    _dense_split[(splits, batch * heads)](
        *(query, key, value, partial, lse, scaling * math.log2(math.e), tokens, tile.split, group),
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=3,
    )
    return merged(partial, lse, query.dtype).view(query.shape)


def wsvd_method(operands: Operands, tile: Tile) -> Tensor:
    """Attention of one query token over latents in 16 bits or symmetric 8, ranks and head size powers of two.

    Section 4 of WSVD (arXiv 2604.02570): a program a query head, whatever query heads share. `[B, Hq, 1, D]`.
    """
    query, part = operands.query, operands.part
    batch, query_heads, _, head_dim = query.shape
    heads, tokens = part.key.payload.shape[1:3]
    rank = part.key.width
    splits = triton.cdiv(tokens, tile.split)
    partial = query.new_empty((batch * query_heads, splits, rank), dtype=torch.float32)
    lse = query.new_empty((batch * query_heads, splits), dtype=torch.float32)
    payloads = [side.payload.view(torch.int8) if side.bits == 8 else side.payload for side in (part.key, part.value)]
    _wsvd_split[(splits, batch * query_heads)](
        *(query, *payloads, part.key.scales, part.value.scales, part.key_up, partial, lse),
        *(operands.scaling * math.log2(math.e), -2 * math.log2(ROPE_BASE) / head_dim),
        *(tokens, tile.split, query_heads, query_heads // heads),
        HEAD_DIM=head_dim,
        RANK=rank,
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=2,
    )
    latents = merged(partial, lse, query.dtype).view(batch, heads, query_heads // heads, rank)
    return (latents @ part.value_up.transpose(1, 2)).view(query.shape)


def merged(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Splits `[rows, splits, width]` with logarithms `[rows, splits]` of base 2 as one `[rows, width]`."""
    rows, splits, width = partial.shape
    out = partial.new_empty((rows, width), dtype=dtype)
    _merge[(rows,)](partial, lse, out, splits, WIDTH=width, SPLITS=triton.next_power_of_2(splits))
    return out


def fitting_wsvd(operands: Operands) -> bool:
    """Whether `wsvd_method` takes them."""
    key, value = operands.part.key, operands.part.value
    form = (key.code, key.bits) in (("float", 16), ("symmetric", 8)) and key.width == value.width
    return form and operands.part.key_up is not None and key.groups <= 1
