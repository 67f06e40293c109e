"""Launches of the Hopper kernels: position queries for heads of their own, tile reconstruction for groups."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decode_call import DecodeCall
from .hopper_form import TILE_TOKENS, Form, side_of, tile_constants
from .hopper_operands import (
    ALIGNMENT,
    fast_kernel,
    hopper_obstacle,
    operands_obstacle,
    row_strides,
    scale_descriptor,
    token_descriptor,
)
from .stored_tokens import DecodePart, StoredTokens
from .tiles import AnyTile, device_facts, tile_for


# What starting a program costs, in tokens of one head: it prepares its operands and waits for its first tile.
START_TOKENS = 512
LARGEST_TILE = 128  # tokens; splits are multiples


class Plan(NamedTuple):
    """What launches of operands in the same form, lying in the same way, share.

    Attributes:
        kernel: the one for the query heads of a KV head.
        obstacle: why it cannot serve them; None if it can.
        form: what it is compiled for; None with an obstacle.
        numbers: its arguments that are whole numbers known here.
    """

    kernel: str
    obstacle: str | None
    form: Form | None = None
    numbers: dict[str, int] | None = None


_plans: dict[tuple, Plan] = {}
MOST_PLANS = 4096


def plan_of(part: DecodePart, call: DecodeCall) -> Plan:
    """The plan for a part of a call, remembered by shapes, strides, dtypes and alignment: no address is in it."""
    obstacle = hopper_obstacle(call.query.device)
    if obstacle is not None:
        return Plan(fast_kernel(call.group), obstacle)
    name = _signature(part, call)
    plan = _plans.get(name)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[name] = make_plan(part, call)
    return plan


def make_plan(part: DecodePart, call: DecodeCall) -> Plan:
    """See `plan_of`."""
    kernel = fast_kernel(call.group)
    obstacle = operands_obstacle(part, call)
    if obstacle is not None:
        return Plan(kernel, obstacle)
    query, key, value, norm = call.query, part.key, part.value, call.norm
    norm_kind = 0 if norm is None else 1 if norm.before else 2
    form = Form(query.shape[3], side_of(key), side_of(value), call.group, part.key_bias is not None, norm_kind)
    key_rows, value_rows = row_strides(key.payload), row_strides(value.payload)
    numbers = {
        "key_width": key.width,
        "value_width": value.width,
        "query_batch_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "up_head_stride": part.key_up.stride(0),
        "up_channel_stride": part.key_up.stride(1),
        "mask_batch_stride": 0 if call.mask is None or call.mask.shape[0] == 1 else call.mask.stride(0),
        "key_batch_rows": key_rows[0],
        "key_head_rows": key_rows[1],
        "value_batch_rows": value_rows[0],
        "value_head_rows": value_rows[1],
        "rows_batch_rows": row_strides(call.rotation.cos[:, None])[0],
    }
    if kernel == "tile_reconstruction":
        numbers["bias_head_stride"] = 0 if part.key_bias is None else part.key_bias.stride(0)
    return Plan(kernel, None, form, numbers)


def _signature(part: DecodePart, call: DecodeCall) -> tuple:
    key, value, rotation, norm = part.key, part.value, call.rotation, call.norm
    return (
        _lying(call.query),
        call.query.device,
        call.kv_heads,
        None if rotation is None else (_lying(rotation.cos), _lying(rotation.sin), rotation.interleaved),
        _lying(call.mask),
        (call.softcap is None, call.window is None, part.places is None),
        None if norm is None else (_lying(norm.weight), norm.before),
        (_lying(key.payload), _lying(key.scales), key.width, key.code, key.bits),
        (_lying(value.payload), _lying(value.scales), value.width, value.code, value.bits),
        _lying(part.key_up),
        _lying(part.key_bias),
    )


def _lying(tensor: Tensor | None) -> tuple | None:
    """All that matters of a tensor but for where it is."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT


def hopper_decode(part: DecodePart, call: DecodeCall, tile: AnyTile | None = None) -> tuple[Tensor, Tensor]:
    """First stage of attention over one part, see `general_decode`; the twin is `decode_part_oracle`.

    Args:
        part, call: without an obstacle.
        tile: how to divide the work, of the class of the kernel for these query heads; None: as the tile tables say.

    Returns:
        `partial [B, Hp G, 1, splits, value width]` and `lse [B, Hp G, 1, splits]`, both fp32; several groups of warps
        have a split each.

    Raises:
        ValueError: a tile that shared memory does not hold.
    """
    plan = plan_of(part, call)
    tile = tile or choose_tile(plan.kernel, part, call)
    query, rotation, norm = call.query, call.rotation, call.norm
    heads, slots = part.key.payload.shape[1:3]
    constants = tile_constants(plan.kernel, plan.form, tile, heads)
    together = constants["HEADS"]
    batch, programs = query.shape[0], heads // together
    split_tokens = split_of(tile, slots, batch * programs, query.device)
    splits = math.ceil(slots / split_tokens)
    results = 2 if plan.kernel == "position_query" else constants["GROUPS"] // together
    shape = (batch, heads * call.group, 1, results * splits)
    partial = query.new_empty((*shape, part.value.width), dtype=torch.float32)
    lse = query.new_empty(shape, dtype=torch.float32)
    arguments = {
        **descriptors(plan, part, rotation.cos[:, None], rotation.sin[:, None]),
        **pointers(part, call),
        "partial": partial,
        "lse": lse,
        "scale": call.scaling * math.log2(math.e),
        "slots": slots,
        "first": part.first,
        "split_tokens": split_tokens,
        "splits": splits,
        **plan.numbers,
    }
    if plan.kernel == "tile_reconstruction":
        arguments |= {
            "key_bias": part.key_bias,
            "norm_weight": None if norm is None else norm.weight,
            "norm_epsilon": 0.0 if norm is None else float(norm.epsilon),
        }
    kernel_named(plan.kernel)[(splits, programs, batch)](
        **arguments,
        **plan.form.constants(plan.kernel),
        **constants,
        num_warps=4,
        enable_fp_fusion=True,  # the default until Triton 3.9; sums are chains of fused operations
    )
    return partial, lse


def kernel_named(name: str) -> Any:
    """The compiled function."""
    if name == "position_query":
        from .position_query import position_query_kernel

        return position_query_kernel
    from .tile_reconstruction import tile_reconstruction_kernel

    return tile_reconstruction_kernel


def descriptors(plan: Plan, part: DecodePart, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """What bulk copies read, by argument."""
    tokens = TILE_TOKENS[plan.kernel]
    key_rank, value_rank = plan.form.ranks(plan.kernel)
    half = cos.shape[3]
    return {
        "key": token_descriptor(part.key.payload, tokens, tile_width(part.key, key_rank)),
        "value": token_descriptor(part.value.payload, tokens, tile_width(part.value, value_rank)),
        "key_scales": scale_descriptor(part.key, tokens),
        "value_scales": scale_descriptor(part.value, tokens),
        "cos": token_descriptor(cos, tokens, half),
        "sin": token_descriptor(sin, tokens, half),
    }


def tile_width(stored: StoredTokens, rank: int) -> int:
    """Numbers or bytes of a token in a tile of padded rank."""
    return rank // 2 if stored.bits == 4 else rank


def pointers(part: DecodePart, call: DecodeCall) -> dict[str, Any]:
    """Tensors that are read by pointers, by argument, and None for what there is not."""
    from .general_launch import head_numbers

    return {
        "query": call.query,
        "key_up": part.key_up,
        "mask": None if call.mask is None else call.mask[:, 0, -1].view(torch.uint8),
        "heads": None if part.heads is None else head_numbers(part.heads, call.query.device),
        "lengths": call.lengths,
        "starts": call.starts,
    }


def choose_tile(kernel: str, part: DecodePart, call: DecodeCall) -> AnyTile:
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


def split_of(tile: AnyTile, tokens: int, programs: int, device: torch.device) -> int:
    """Tokens of a split for a tile, see `balanced_split`."""
    shortest = max(tile.shortest_split, LARGEST_TILE)
    return balanced_split(tokens, programs, device_facts(str(device))[1], shortest)


@lru_cache(maxsize=4096)
def balanced_split(tokens: int, programs: int, multiprocessors: int, shortest: int) -> int:
    """Tokens of a split, a multiple of a tile, for which the last multiprocessor is done first.

    A program takes a multiprocessor for itself, so that what counts is how many must follow each other.

    Args:
        tokens: of a sequence.
        programs: that there are without splitting.
        multiprocessors: of the device.
        shortest: the fewest tokens of a split.
    """

    def cost(splits: int) -> float:
        waves = math.ceil(programs * splits / multiprocessors)
        return waves * (math.ceil(tokens / splits / LARGEST_TILE) * LARGEST_TILE + START_TOKENS)

    most = max(1, min(tokens // shortest, 4 * multiprocessors))
    splits = min(range(1, most + 1), key=cost)
    return math.ceil(tokens / splits / LARGEST_TILE) * LARGEST_TILE
