"""Decode attention as an operator of torch, which compiled graphs keep as one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .decode_call import DecodeCall, layer_heads, part_heads, sequence_tokens
from .latent_heads import Rotation
from .stored_tokens import DecodePart, KeyNormWeights, StoredTokens


CODES = ("float", "fp8", "symmetric", "asymmetric", "codebook")
TENSORS_A_PART = 13
NUMBERS_A_PART = 8


def flatten(parts: Sequence[DecodePart]) -> tuple[list[Tensor | None], list[int]]:
    """`parts` as arguments of an operator: tensors, and whole numbers for what is no tensor."""
    tensors: list[Tensor | None] = []
    numbers: list[int] = []
    for part in parts:
        for stored in (part.key, part.value):
            tensors += [stored.payload, stored.scales, stored.head_scales, stored.levels]
            numbers += [stored.width, CODES.index(stored.code), stored.bits]
        tensors += [part.key_up, part.value_up, part.key_bias, part.value_bias, part.places]
        heads = () if part.heads is None else part.heads
        numbers += [part.first, len(heads), *heads]
    return tensors, numbers


def unflatten(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Iterator[DecodePart]:
    """The parts of which `flatten` made its result."""
    while tensors:
        own, tensors = tensors[:TENSORS_A_PART], tensors[TENSORS_A_PART:]
        sizes, numbers = numbers[:NUMBERS_A_PART], numbers[NUMBERS_A_PART:]
        first, count = sizes[6:]
        heads, numbers = tuple(numbers[:count]), numbers[count:]
        key, value = (
            StoredTokens(payload, scales, width, CODES[code], bits, head_scales, levels)
            for (payload, scales, head_scales, levels), (width, code, bits) in zip(
                (own[:4], own[4:8]), (sizes[:3], sizes[3:6])
            )
        )
        up, value_up, bias, value_bias, places = own[8:]
        yield DecodePart(key, value, up, value_up, bias, value_bias, heads or None, places, first)


@torch.library.custom_op("hf_wsvd::fused_attention", mutates_args=())
def fused_attention_op(
    query: Tensor,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    window: int | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    norm_weight: Tensor | None,
    norm_epsilon: float,
    norm_before: bool,
) -> Tensor:
    """`fused_attention` of checked arguments; `tensors` and `numbers` are those of `flatten`."""
    parts = list(unflatten(tensors, numbers))
    rotation = None if cos is None else Rotation(cos, sin, interleaved)
    norm = None if norm_weight is None else KeyNormWeights(norm_weight, norm_epsilon, norm_before)
    tokens = sequence_tokens(parts, rotation, mask, lengths)
    call = DecodeCall(
        query, layer_heads(parts), tokens, scaling, rotation, mask, softcap, window, lengths, starts, norm
    )
    return attend(parts, call)


@fused_attention_op.register_fake
def _(query: Tensor, *arguments, **keywords) -> Tensor:
    batch, heads, queries, head_dim = query.shape
    return query.new_empty((batch, queries, heads, head_dim))


def launch_decode(part: DecodePart, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """First stage for one part, by the kernel that suits it.

    Returns:
        `partial [B, Hp G, N, splits, value width]` and `lse [B, Hp G, N, splits]`, see `general_decode`.
    """
    from .dispatch import kernel_of
    from .general_launch import general_decode
    from .hopper_launch import hopper_decode

    decode = general_decode if kernel_of(part, call).kernel == "general" else hopper_decode
    return decode(part, call)


def attend(parts: Sequence[DecodePart], call: DecodeCall) -> Tensor:
    """Both stages for all parts, checked: `[B, N, Hq, D]` in the query's dtype.

    Parts of different heads are merged into one result, in one launch each; only where tokens of one head lie in
    several parts is there more than one result to merge.
    """
    from .combine import combine, merge_segments
    from .general_launch import head_numbers

    query = call.query
    batch, query_heads, queries, head_dim = query.shape
    parts = [part for part in parts if part.key.payload.shape[2]]
    results = results_of_parts([part_heads(part) for part in parts])
    complete = sum(len(part_heads(part)) for part in parts) == call.kv_heads and max(results, default=0) == 0
    shape = (batch, queries, query_heads, head_dim)
    with torch.cuda.device_of(query):
        if complete:
            outs, lses = query.new_empty((1, *shape)), [None]
        else:
            count = max(results, default=0) + 1
            outs = query.new_zeros((count, *shape), dtype=torch.float32)
            lses = outs.new_full((count, batch, query_heads, queries), float("-inf"))
        for part, result in zip(parts, results):
            partial, lse = launch_decode(part, call)
            heads = None if part.heads is None else head_numbers(part.heads, query.device)
            combine(partial, lse, outs[result], lses[result], part.value_up, part.value_bias, heads, call.group)
        return outs[0] if complete else merge_segments(outs, lses, query.dtype)


def results_of_parts(heads: Sequence[tuple[int, ...]]) -> list[int]:
    """For each part the number of the result that it goes into: the first in which its heads are free."""
    taken: list[set[int]] = []
    chosen = []
    for own in map(set, heads):
        number = next((number for number, others in enumerate(taken) if not own & others), len(taken))
        if number == len(taken):
            taken.append(set())
        taken[number] |= own
        chosen.append(number)
    return chosen
