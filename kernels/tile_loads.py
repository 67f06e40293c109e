"""Device functions that load tiles: of cached tokens, in every code of `StoredTokens`, and of what meets them.

A tile of tokens is `[T, C]`: T consecutive tokens of one head, any C channels of theirs. What lies outside reads as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_numbers(
    payload,
    scales,
    levels,
    head_scale,
    tokens,
    readable,
    channels,
    payload_stride,
    scales_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """The numbers of a tile `[T, C]`: in the payload's dtype for code "float", else in fp32.

    Args:
        payload, scales: pointers to the row of token 0; `scales` None for codes without.
        levels: pointer to the levels of a codebook, or None.
        head_scale: fp32 factor of the head (code "fp8"), or None.
        tokens: int32 `[T]`.
        readable: bool `[T]`; memory of other tokens is not touched.
        channels: int32 `[C]`; those from WIDTH on read as 0.
        payload_stride, scales_stride: elements from token to token.
        WIDTH, GROUPS, CODE, BITS: as in `StoredTokens`.
    """
    inside = readable[:, None] & (channels < WIDTH)[None, :]
    rows = payload + tokens[:, None] * payload_stride
    if CODE == "float":
        numbers = tl.load(rows + channels[None, :], mask=inside, other=0.0)
    else:
        codes = load_codes(rows, channels[None, :], inside, WIDTH, BITS)
        if CODE == "fp8":
            numbers = e4m3_to_float(codes)
        elif CODE == "codebook":
            numbers = tl.load(levels + codes)
        elif CODE == "symmetric":
            numbers = symmetric_levels(codes, BITS)
        else:
            numbers = codes.to(tl.float32)
    # Scaled in fp32 whatever comes next: a level times its scale need not fit into fp16.
    if head_scale is not None:
        numbers *= head_scale
    if scales is not None:
        scale_rows = scales + tokens[:, None] * scales_stride
        if GROUPS == 1:  # one load a token
            scales_inside = readable[:, None]
        else:
            scale_rows += channels[None, :] // (WIDTH // GROUPS)
            scales_inside = inside
        numbers *= tl.load(scale_rows, mask=scales_inside, other=0.0).to(tl.float32)
        if CODE == "asymmetric":
            numbers += tl.load(scale_rows + GROUPS, mask=scales_inside, other=0.0).to(tl.float32)
            numbers = tl.where(inside, numbers, 0.0)  # a zero is that of the channels behind the width too
    return numbers


@triton.jit
def load_codes(rows, channels, inside, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Codes (int32) of `channels` from bytes at `rows`, in the planes of `kernels.packing`."""
    if BITS == 3:
        low = load_plane(rows, channels, inside, (WIDTH + 7) // 8 * 2, 2)
        high = load_plane(rows + (WIDTH + 7) // 8 * 2, channels, inside, (WIDTH + 7) // 8, 1)
        codes = low | (high << 2)
    else:
        codes = load_plane(rows, channels, inside, (WIDTH * BITS + 7) // 8, BITS)
    return codes


@triton.jit
def load_plane(rows, channels, inside, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Fields of BITS bits in PLANE bytes: byte j has channels j, j + PLANE, ... from the low bits up."""
    if BITS == 8:
        codes = tl.load(rows + channels, mask=inside, other=0).to(tl.int32)
    else:
        packed = tl.load(rows + channels % PLANE, mask=inside, other=0).to(tl.int32)
        codes = (packed >> (channels // PLANE * BITS)) & (2**BITS - 1)
    return codes


@triton.jit
def symmetric_levels(codes, BITS: tl.constexpr):
    """fp32 levels of symmetric codes, see `hf_wsvd.storage.minmax.MinMaxCodec`."""
    if BITS == 8:
        levels = codes.to(tl.int8)  # two's complement
    elif BITS == 4:
        levels = codes - 8
    else:
        levels = codes * 2 - (2**BITS - 1)
    return levels.to(tl.float32)


@triton.jit
def e4m3_to_float(codes):
    """fp32 of the bits of float8_e4m3fn, on devices without that type too.

    The fields of e4m3, moved to where fp16 has its own, are a number 2^8 times too small, as the exponents' biases are
    7 and 15; subnormal numbers come out right. Only NaN (all ones) would read as 480.
    """
    moved = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    numbers = moved.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def pair_channels(
    pair,
    ELEMENT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Channel of the first or second element of each pair; HEAD_DIM, which reads as 0, behind the last pair."""
    if INTERLEAVED:
        channels = 2 * pair + ELEMENT
    else:
        channels = pair + ELEMENT * HALF
    if HALF < HALF_BLOCK:
        channels = tl.where(pair < HALF, channels, HEAD_DIM)
    return channels


@triton.jit
def load_query(rows, channels, row_inside, HEAD_DIM: tl.constexpr):
    """Some channels of the query rows, `[ROWS, C]`."""
    inside = row_inside[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(rows[:, None] + channels[None, :], mask=inside, other=0.0)


@triton.jit
def load_up(
    up,
    channels,
    channel_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    dtype: tl.constexpr,
):
    """Some rows of an expansion `[D, WIDTH]`, transposed: `[BLOCK, C]`; None for None."""
    tile = None
    if up is not None:
        ranks = tl.arange(0, BLOCK)
        inside = (ranks < WIDTH)[:, None] & (channels < HEAD_DIM)[None, :]
        tile = tl.load(up + channels[None, :] * channel_stride + ranks[:, None], mask=inside, other=0.0).to(dtype)
    return tile


@triton.jit
def load_row(row, channels, HEAD_DIM: tl.constexpr):
    """Some channels of a vector `[D]` in fp32; None for None."""
    numbers = None
    if row is not None:
        numbers = tl.load(row + channels, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def expand_keys(
    latents,
    up,
    bias,
    payload,
    scales,
    levels,
    head_scale,
    tokens,
    readable,
    channels,
    payload_stride,
    scales_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Some channels of the keys of a tile, `[T, C]` fp32: from their latents, or loaded where `up` is None."""
    if up is None:
        keys = load_numbers(
            payload, scales, levels, head_scale, tokens, readable, channels, payload_stride, scales_stride,
            WIDTH, GROUPS, CODE, BITS,
        ).to(tl.float32)  # fmt: skip
    else:
        keys = tl.dot(latents, up, input_precision="ieee")
    if bias is not None:
        keys += bias[None, :]
    return keys
