"""Launches of the general decode kernel, and its forms for compiling ahead of time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from .decode_call import DecodeCall, hidden_below
from .general_decode import general_decode_kernel
from .stored_tokens import DecodePart, StoredTokens
from .tiles import Tile, tile_for


SMALLEST_BLOCK = 16  # that a product on tensor cores takes


def general_decode(part: DecodePart, call: DecodeCall, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Attention of all queries to the tokens of one part, unmerged.

    Args:
        part: checked, with at least one slot.
        call: the rest of the arguments.
        tile: how to divide the work; None: as the tile tables say.

    Returns:
        `partial [B, Hp G, N, splits, value width]` fp32, normalised within the split, and `lse [B, Hp G, N, splits]`
        fp32, of base 2: -inf where a split saw nothing. Hp are the part's KV heads, in its order.
    """
    if tile is None:
        tile = choose_tile(part, call)
    batch, _, queries, _ = call.query.shape
    heads, slots = part.key.payload.shape[1:3]
    shape = (batch, heads * call.group, queries, triton.cdiv(slots, tile.split_tokens))
    partial = call.query.new_empty((*shape, part.value.width), dtype=torch.float32)
    lse = call.query.new_empty(shape, dtype=torch.float32)
    arguments, constants = launch_arguments(part, call, partial, lse, tile.split_tokens)
    constants["TOKENS"] = tile.block_tokens
    grid = (shape[3] * triton.cdiv(call.group * queries, constants["ROWS"]), heads, batch)
    general_decode_kernel[grid](**arguments, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return partial, lse


def choose_tile(part: DecodePart, call: DecodeCall, architecture: int | None = None) -> Tile:
    """The entry of the tile tables for a part, by shapes alone; smaller where its loads take more registers.

    `architecture`: a compute capability such as 90; None: that of the query's device.
    """
    batch, _, queries, head_dim = call.query.shape
    heads, slots = part.key.payload.shape[1:3]
    tile = tile_for(
        "general",
        head_dim=head_dim,
        key_rank=part.key.width,
        value_rank=part.value.width,
        bits=part.key.bits,
        code=part.key.code,
        group=call.group * queries,
        tokens=slots,
        batch=batch,
        kv_heads=heads,
        device=call.query.device,
    )
    if call.query.device.type == "cpu":  # interpreted: the fewer steps the better, and nothing can spill
        return tile
    # From here on numbers are what the compiler's register counts asked for.
    if call.query.dtype == torch.float32:  # for checks rather than for speed
        return tile._replace(block_tokens=16, num_warps=4, num_stages=1)
    narrow = min(tile.block_tokens, 32)
    ragged = any(stored.width % 16 or stored.bits == 3 for stored in (part.key, part.value))  # no vector loads
    if ragged or row_block(call) > 32 or (part.key_bias is not None and part.places is not None):
        return tile._replace(block_tokens=narrow, num_warps=8)
    if architecture is None:
        architecture = compute_capability(call.query.device)
    wide = part.key_up is not None and block(part.key.width) * head_dim > 64 * 128
    cramped = architecture >= 120 or (architecture < 90 and "codebook" in (part.key.code, part.value.code))
    if wide or cramped:
        return tile._replace(block_tokens=narrow)
    return tile


@lru_cache(maxsize=64)
def compute_capability(device: torch.device) -> int:
    """Of a CUDA device, such as 90 for 9.0; 0 for others."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def row_block(call: DecodeCall) -> int:
    """Query rows of a program: all of the group where that fits."""
    return min(block(call.group * call.query.shape[2]), 64 if call.query.shape[3] <= 128 else 16)


def launch_arguments(
    part: DecodePart, call: DecodeCall, partial: Tensor, lse: Tensor, split_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `general_decode_kernel` by name, and its constants but for TOKENS."""
    query, rotation, mask, norm = call.query, call.rotation, call.mask, call.norm
    head_dim = query.shape[3]
    half = 0 if rotation is None else rotation.cos.shape[-1]
    hidden = None
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    elif mask is not None:
        hidden = hidden_below(mask)
    arguments = {
        "query": query,
        "cos": None if rotation is None else rotation.cos,
        "sin": None if rotation is None else rotation.sin,
        "norm_weight": None if norm is None else norm.weight,
        "mask": mask,
        "lengths": call.lengths,
        "starts": call.starts,
        "places": part.places,
        "heads": None if part.heads is None else head_numbers(part.heads, query.device),
        **_stored_arguments("key", part.key),
        **_stored_arguments("value", part.value),
        "key_up": part.key_up,
        "key_bias": part.key_bias,
        "partial": partial,
        "lse": lse,
        "scaling": call.scaling,
        "softcap": call.softcap,
        "norm_epsilon": None if norm is None else norm.epsilon,
        "hidden": hidden,
        "slots": part.key.payload.shape[2],
        "first": part.first,
        "places_end": call.tokens,
        "window": call.window,
        "splits": lse.shape[3],
        "split_tokens": split_tokens,
        "group": call.group,
        "queries": query.shape[2],
        **_strides("query", query, ("batch", "head", "token")),
        **_strides("rows", None if rotation is None else rotation.cos, ("batch", "token")),
        **_strides("mask", mask, ("batch", "head", "query", "token")),
        **_strides("places", part.places, ("batch",)),
        **_strides("key_up", part.key_up, ("head", "channel")),
        **_strides("key_bias", part.key_bias, ("head",)),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_BLOCK": block(half),
        "TAIL_BLOCK": block(head_dim - 2 * half),
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NORM_BEFORE": norm is not None and norm.before,
        **_stored_constants("KEY", part.key),
        **_stored_constants("VALUE", part.value),
        "ROWS": row_block(call),
    }
    return arguments, constants


def block(size: int) -> int:
    """Power of two that holds `size`, large enough for tensor cores; 0 for none."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size)) if size else 0


@lru_cache(maxsize=1024)
def head_numbers(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """`heads` on the device, copied there once: a step that is captured or repeated must not copy from the host."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


def _stored_arguments(name: str, stored: StoredTokens) -> dict[str, Any]:
    return {
        name: stored.payload,
        f"{name}_scales": stored.scales,
        f"{name}_levels": stored.levels,
        f"{name}_head_scales": stored.head_scales,
        **_strides(name, stored.payload, ("batch", "head", "token")),
        **_strides(f"{name}_scales", stored.scales, ("batch", "head", "token")),
    }


def _stored_constants(name: str, stored: StoredTokens) -> dict[str, Any]:
    return {
        f"{name}_WIDTH": stored.width,
        f"{name}_BLOCK": block(stored.width),
        f"{name}_GROUPS": stored.groups,
        f"{name}_CODE": stored.code,
        f"{name}_BITS": stored.bits,
    }


def _strides(name: str, tensor: Tensor | None, axes: tuple[str, ...]) -> dict[str, int | None]:
    """Strides of the leading axes, 0 for an axis of one row that serves all; None without a tensor."""
    if tensor is None:
        return {f"{name}_{axis}_stride": None for axis in axes}
    return {
        f"{name}_{axis}_stride": 0 if size == 1 else stride
        for axis, size, stride in zip(axes, tensor.shape, tensor.stride())
    }
