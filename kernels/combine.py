"""The second stage of decode attention: splits merged, value latents expanded."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


LARGEST_TILE = 8192  # numbers that a program of 4 warps holds without spills


def combine_oracle(
    partial: Tensor, lse: Tensor, value_up: Tensor | None = None, value_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of `combine`, in fp64: `[B, N, Hq, D]` and the `lse [B, Hq, N]` of all splits.

    Args:
        partial: `[B, Hq, N, splits, width]`; anything where `lse` is -inf.
        lse: `[B, Hq, N, splits]`, base 2.
        value_up, value_bias: `[H, D, width]` and `[H, D]`, H a divisor of Hq, or None.
    """
    lse = lse.double()
    merged = lse.mul(math.log(2)).logsumexp(-1) / math.log(2)
    seen = (lse != -math.inf)[..., None]
    weights = torch.where(seen, torch.exp2(lse - merged[..., None])[..., None], 0)
    out = (partial.double().masked_fill(~seen, 0) * weights).sum(-2)
    group = lse.shape[1] // (value_up if value_up is not None else lse.new_empty(lse.shape[1])).shape[0]
    if value_up is not None:
        out = out @ value_up.double().repeat_interleave(group, dim=0).transpose(1, 2)
    if value_bias is not None:
        bias = value_bias.double().repeat_interleave(lse.shape[1] // value_bias.shape[0], dim=0)
        out = out + bias[:, None]
    return out.masked_fill(~seen.any(-2), 0).transpose(1, 2), merged


def combine(
    partial: Tensor,
    lse: Tensor,
    out: Tensor,
    merged_lse: Tensor | None = None,
    value_up: Tensor | None = None,
    value_bias: Tensor | None = None,
    heads: Tensor | None = None,
    group: int = 1,
) -> None:
    """Merge the splits of a part, expand its values, and write the rows of its heads.

    Args:
        partial: `[B, Hp G, N, splits, width]` fp32, contiguous; anything where `lse` is -inf.
        lse: `[B, Hp G, N, splits]` fp32, contiguous, base 2.
        out: `[B, N, Hq, D]`, last axis contiguous; rows that saw nothing become 0.
        merged_lse: fp32 `[B, Hq, N]`, contiguous, written too, or None.
        value_up, value_bias: `[Hp, D, width]` and `[Hp, D]`, last axis contiguous, or None.
        heads: int32 `[Hp]` on the device, the layer's KV heads that the part has; None for all.
        group: query heads of a KV head, G.
    """
    arguments, constants = combine_arguments(partial, lse, out, merged_lse, value_up, value_bias, heads, group)
    batch, part_heads, queries = partial.shape[:3]
    combine_kernel[(part_heads, queries, batch)](**arguments, **constants, num_warps=4)


def combine_arguments(
    partial: Tensor,
    lse: Tensor,
    out: Tensor,
    merged_lse: Tensor | None = None,
    value_up: Tensor | None = None,
    value_bias: Tensor | None = None,
    heads: Tensor | None = None,
    group: int = 1,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `combine_kernel` by name, and its constants. Arguments as those of `combine`."""
    splits, width = partial.shape[3:]
    width_block = triton.next_power_of_2(width)
    arguments = {
        "partial": partial,
        "lse": lse,
        "out": out,
        "merged_lse": merged_lse,
        "value_up": value_up,
        "value_bias": value_bias,
        "heads": heads,
        "splits": splits,
        "group": group,
        "layer_heads": out.shape[2],
        "out_batch_stride": out.stride(0),
        "out_query_stride": out.stride(1),
        "out_head_stride": out.stride(2),
        "up_head_stride": None if value_up is None else value_up.stride(0),
        "up_channel_stride": None if value_up is None else value_up.stride(1),
        "bias_head_stride": None if value_bias is None else value_bias.stride(0),
    }
    constants = {
        "HEAD_DIM": out.shape[3],
        "WIDTH": width,
        "WIDTH_BLOCK": width_block,
        "SPLITS_BLOCK": min(triton.next_power_of_2(splits), LARGEST_TILE // width_block),
        "CHANNELS": min(triton.next_power_of_2(out.shape[3]), LARGEST_TILE // width_block),
    }
    return arguments, constants


CHANGING = ["splits", "group", "layer_heads", "out_batch_stride", "out_query_stride"]


@triton.jit(do_not_specialize=CHANGING)
def combine_kernel(
    partial,
    lse,
    out,
    merged_lse,
    value_up,
    value_bias,
    heads,
    splits,
    group,
    layer_heads,
    out_batch_stride,
    out_query_stride,
    out_head_stride,
    up_head_stride,
    up_channel_stride,
    bias_head_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One query head and token of a sequence. Grid `(query heads of the part, N, B)`."""
    head = tl.program_id(0)
    number = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = head // group
    layer_kv_head = kv_head
    if heads is not None:
        layer_kv_head = tl.load(heads + kv_head)
    layer_head = layer_kv_head * group + head % group

    row = ((batch * tl.num_programs(0) + head) * tl.num_programs(1) + number) * splits
    rank = tl.arange(0, WIDTH_BLOCK)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([WIDTH_BLOCK], tl.float32)
    for first in range(0, splits, SPLITS_BLOCK):
        split = first + tl.arange(0, SPLITS_BLOCK)
        exponents = tl.load(lse + row + split, mask=split < splits, other=float("-inf"))
        seen = exponents > float("-inf")
        now_highest = tl.maximum(highest, tl.max(exponents, 0))
        base = tl.where(now_highest == float("-inf"), 0.0, now_highest)
        weights = tl.exp2(exponents - base)
        decay = tl.exp2(highest - base)
        highest = now_highest
        rows = partial + (row + split)[:, None] * WIDTH + rank[None, :]
        parts = tl.load(rows, mask=seen[:, None] & (rank < WIDTH)[None, :], other=0.0)
        mixed = mixed * decay + tl.sum(parts * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
    seen_any = total > 0
    total = tl.where(seen_any, total, 1.0)
    mixed /= total
    if merged_lse is not None:
        target = (batch * layer_heads + layer_head) * tl.num_programs(1) + number
        tl.store(merged_lse + target, highest + tl.log2(total))

    out += batch * out_batch_stride + number * out_query_stride + layer_head.to(tl.int64) * out_head_stride
    if value_up is None:
        if value_bias is not None:
            bias = tl.load(value_bias + kv_head * bias_head_stride + rank, mask=rank < WIDTH, other=0.0)
            mixed = tl.where(seen_any, mixed + bias.to(tl.float32), 0.0)
        tl.store(out + rank, mixed.to(out.dtype.element_ty), mask=rank < WIDTH)
    else:
        value_up += kv_head.to(tl.int64) * up_head_stride
        for first_channel in range(0, HEAD_DIM, CHANNELS):
            channel = first_channel + tl.arange(0, CHANNELS)
            inside = channel < HEAD_DIM
            columns = value_up + channel[:, None] * up_channel_stride + rank[None, :]
            up = tl.load(columns, mask=inside[:, None] & (rank < WIDTH)[None, :], other=0.0).to(tl.float32)
            values = tl.sum(up * mixed[None, :], 1)
            if value_bias is not None:
                bias = tl.load(value_bias + kv_head * bias_head_stride + channel, mask=inside, other=0.0)
                values = tl.where(seen_any, values + bias.to(tl.float32), 0.0)
            tl.store(out + channel, values.to(out.dtype.element_ty), mask=inside)


def merge_segments(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> Tensor:
    """One softmax of several, in fp32: tokens of a head that lie in several parts.

    Args:
        outs: `[P, B, N, Hq, D]`, each normalised.
        lses: `[P, B, Hq, N]`, base 2, -inf where the part saw nothing or has no such head (its `outs` is 0 then).
        dtype: of the result.

    Returns:
        `[B, N, Hq, D]`; 0 where no part saw anything.
    """
    highest = lses.amax(0)
    weights = torch.exp2(lses - torch.where(highest == -math.inf, 0, highest))
    weights = weights / weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return torch.einsum("pbhn,pbnhd->bnhd", weights, outs).to(dtype)
