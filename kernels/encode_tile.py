"""Device functions that code a tile of tokens and write the codes as `kernels.packing` lays them out.

A tile has `TOKENS` tokens of one head. Its columns stand in the order in which bytes take them: with P codes of each
plane of bytes, Q = padded width / P and QP the next power of two, column p QP + j is channel p Q + j. So the codes of
a byte are those of one j.
"""

import triton
import triton.language as tl


TOKEN_UNIT = tl.constexpr(2.0**-20)
ROTATION_UNIT = tl.constexpr(2.0**-24)
LARGEST_OF_GROUP = tl.constexpr(65440.0)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal fp32


@triton.jit
def round_half_even(x):
    """The nearest integer of fp32 numbers of at most 2^22: adding 1.5 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def not_finite(x):
    return (x - x) != 0


@triton.jit
def channels_of(WIDTH: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr):
    """The channel of each column of a tile, and whether there is one."""
    column = tl.arange(0, P * QP)
    channel = column // QP * Q + column % QP
    return channel, (column % QP < Q) & (channel < WIDTH)


@triton.jit
def integers_of(x, unit):
    """Finite numbers in their unit, rounded; int64, for sums of products that fp32 cannot hold."""
    return round_half_even(tl.div_rn(tl.where(not_finite(x), 0.0, x), unit)).to(tl.int32).to(tl.int64)


@triton.jit
def rotate_tile(
    tokens,
    row,
    row_mask,
    stride,
    rotation,
    channel,
    valid,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PADDED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Tokens at `tokens + row[TOKENS]`, rotated exactly in blocks of channels.

    Returns, for each column: int64 in units of ROTATION_UNIT and of the second result, whether the block has a number
    that is not finite; and the sum of squares of each token, int64.
    """
    rotated = tl.zeros([TOKENS, channel.shape[0]], tl.int64)
    units = tl.full([TOKENS, channel.shape[0]], 1.0, tl.float32)
    bad = tl.zeros([TOKENS, channel.shape[0]], tl.int32)
    squares = tl.zeros([TOKENS], tl.int64)
    all_k = tl.arange(0, BLOCK_PADDED)
    steps = tl.arange(0, STEP)
    for block in range(WIDTH // BLOCK):
        first = block * BLOCK
        inside = valid & (channel >= first) & (channel < first + BLOCK)
        x = tl.load(
            tokens + row[:, None] + (first + all_k)[None, :].to(tl.int64) * stride,
            mask=row_mask[:, None] & (all_k < BLOCK)[None, :],
            other=0.0,
        ).to(tl.float32)
        block_bad = tl.max(not_finite(x).to(tl.int32), axis=1)
        unit = tl.maximum(tl.max(tl.abs(tl.where(not_finite(x), 0.0, x)), axis=1), 1e-30) * TOKEN_UNIT
        units = tl.where(inside[None, :], unit[:, None], units)
        bad = tl.where(inside[None, :], block_bad[:, None], bad)
        for begin in range(0, BLOCK, STEP):
            k = begin + steps
            part = tl.load(
                tokens + row[:, None] + (first + k)[None, :].to(tl.int64) * stride,
                mask=row_mask[:, None] & (k < BLOCK)[None, :],
                other=0.0,
            ).to(tl.float32)
            integers = integers_of(part, unit[:, None])
            squares += tl.sum(integers * integers, axis=1)
            turns = tl.load(
                rotation + k[:, None] * BLOCK + (channel - first)[None, :],
                mask=(k < BLOCK)[:, None] & inside[None, :],
                other=0,
            ).to(tl.int64)
            rotated += tl.sum(integers[:, :, None] * turns[None, :, :], axis=1)
    return rotated, units, bad > 0, squares


@triton.jit
def code_groups(
    x,
    bad,
    channel,
    valid,
    scales,
    scale_row,
    scale_mask,
    SYMMETRIC: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    CODE_STEP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Integer codes of `x [TOKENS, columns]` fp32; writes scales (and zeros) of each group to `scales + scale_row`."""
    scale_of = tl.full(x.shape, 1.0, tl.float32)
    zero_of = tl.zeros(x.shape, tl.float32)
    bad_of = tl.zeros(x.shape, tl.int32)
    # Sums of masked numbers would see NaN; comparisons leave it out.
    finite = tl.where(bad, 0.0, x)
    for group in range(GROUPS):
        inside = (valid & (channel // GROUP_SIZE == group))[None, :]
        low = tl.min(tl.where(inside, finite, float("inf")), axis=1)
        high = tl.max(tl.where(inside, finite, float("-inf")), axis=1)
        group_bad = (tl.max((inside & bad).to(tl.int32), axis=1) > 0) | (high - low == float("inf"))
        low = tl.minimum(tl.maximum(low, -LARGEST_OF_GROUP), LARGEST_OF_GROUP)
        high = tl.minimum(tl.maximum(high, -LARGEST_OF_GROUP), LARGEST_OF_GROUP)
        if SYMMETRIC:
            reach = tl.maximum(high, -low)
            scale = tl.div_rn(reach, tl.full(reach.shape, CODE_STEP * HIGHEST - OFFSET, tl.float32)).to(tl.float16)
        else:
            reach = high - low
            scale = tl.div_rn(reach, tl.full(reach.shape, HIGHEST, tl.float32)).to(tl.float16)
            zero = low.to(tl.float16)
            zero_of = tl.where(inside, zero.to(tl.float32)[:, None], zero_of)
            zero = tl.where(group_bad, tl.full(zero.shape, float("nan"), tl.float16), zero)
            tl.store(scales + scale_row + GROUPS + group, zero, mask=scale_mask)
        scale_of = tl.where(inside, tl.maximum(scale.to(tl.float32), TINY)[:, None], scale_of)
        bad_of = tl.where(inside, group_bad.to(tl.int32)[:, None], bad_of)
        scale = tl.where(group_bad, tl.full(scale.shape, float("nan"), tl.float16), scale)
        tl.store(scales + scale_row + group, scale, mask=scale_mask)
    levels = tl.div_rn(finite - zero_of, scale_of)
    codes = (levels + OFFSET) * (1.0 / CODE_STEP)
    codes = round_half_even(tl.minimum(tl.maximum(codes, LOWEST * 1.0), HIGHEST * 1.0))
    return tl.where(bad_of > 0, 0, codes.to(tl.int32))


@triton.jit
def code_floats(x, scale):
    """Bits of float8_e4m3fn nearest to `x / scale`, by integer arithmetic: not every device has the conversion."""
    x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale)
    nan = x != x
    x = tl.where(nan, 0.0, tl.minimum(tl.maximum(x, -448.0), 448.0))
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = round_half_even(tl.minimum(size, 1.0) * 512.0).to(tl.int32)  # below 2^-6, in steps of 2^-9
    return tl.where(nan, 0x7F, tl.where(size < 0.015625, small, normal) | sign)


@triton.jit
def code_directions(
    rotated,
    unit,
    bad,
    squares,
    valid,
    midpoints,
    code_squares,
    scales,
    scale_row,
    scale_mask,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codebook codes of `rotated [TOKENS, columns]` of `rotate_tile`; writes one scale a token."""
    norm = tl.sqrt(squares.to(tl.float64))
    root = tl.sqrt(tl.full(norm.shape, WIDTH, tl.float64))
    ratio = (1.0 / tl.maximum(norm, 1.0)) * root
    spread = (rotated.to(tl.float64) * ROTATION_UNIT * ratio[:, None]).to(tl.float32)
    spread = tl.where(bad, 0.0, spread)
    codes = tl.zeros(spread.shape, tl.int32)
    for border in tl.static_range(2**BITS - 1):
        codes += (tl.load(midpoints + border) < spread).to(tl.int32)
    known = tl.load(code_squares + codes, mask=valid[None, :] & (codes >= 0), other=0.0)
    length = tl.sqrt(tl.sum(known, axis=1))
    token_bad = tl.max(bad.to(tl.int32), axis=1) > 0
    token_unit = tl.max(tl.where(valid[None, :], unit, 0.0), axis=1)
    scale = tl.minimum(norm / length * token_unit.to(tl.float64), 65504.0).to(tl.float32).to(tl.float16)
    tl.store(
        scales + scale_row, tl.where(token_bad, tl.full(scale.shape, float("nan"), tl.float16), scale), mask=scale_mask
    )
    return codes


@triton.jit
def store_codes(
    codes,
    payload,
    row,
    row_mask,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    QP: tl.constexpr,
):
    """Write `codes [TOKENS, P QP]`, 0 where there is no channel, as bytes to `payload + row`."""
    byte = tl.arange(0, QP)[None, :]
    mask = row_mask[:, None] & (byte < Q)
    target = payload + row[:, None] + byte
    tile = tl.reshape(codes, [TOKENS, P, QP])
    plane = tl.arange(0, P)[None, :, None]
    if BITS == 3:
        # Bytes j and Q + j of the plane of low bits have the codes of even and of odd p.
        low = (tile & 3) << (plane // 2 * 2)
        tl.store(target, tl.sum(tl.where(plane % 2 == 0, low, 0), axis=1).to(tl.uint8), mask=mask)
        tl.store(target + Q, tl.sum(tl.where(plane % 2 == 1, low, 0), axis=1).to(tl.uint8), mask=mask)
        tl.store(target + 2 * Q, tl.sum((tile >> 2) << plane, axis=1).to(tl.uint8), mask=mask)
    else:
        tl.store(target, tl.sum((tile & (2**BITS - 1)) << (plane * BITS), axis=1).to(tl.uint8), mask=mask)


@triton.jit
def encode_tile(
    tokens,
    row,
    row_mask,
    stride,
    payload,
    payload_row,
    scales,
    scale_row,
    store_mask,
    head_scale,
    rotation,
    midpoints,
    code_squares,
    TOKENS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    CODE_STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    QP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PADDED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Code tokens `tokens + row[TOKENS] + channel * stride` and write them to `payload_row` and `scale_row`.

    `row_mask` says which tokens there are, `store_mask` which of them may be written. `BLOCK` is 0 for no rotation.
    """
    channel, valid = channels_of(WIDTH, P, Q, QP)
    if BLOCK > 0:
        rotated, unit, bad, squares = rotate_tile(
            tokens, row, row_mask, stride, rotation, channel, valid, TOKENS, WIDTH, BLOCK, BLOCK_PADDED, STEP
        )
        x = rotated.to(tl.float32) * ROTATION_UNIT * unit
    else:
        there = row_mask[:, None] & valid[None, :]
        x = tl.load(tokens + row[:, None] + channel[None, :].to(tl.int64) * stride, mask=there, other=0.0)
        x = x.to(tl.float32)
        bad = not_finite(x)
    if CODE == "fp8":
        codes = code_floats(x, head_scale)
    elif CODE == "codebook":
        codes = code_directions(
            rotated,
            unit,
            bad,
            squares,
            valid,
            midpoints,
            code_squares,
            scales,
            scale_row,
            store_mask,
            WIDTH,
            BITS,
        )
    else:
        codes = code_groups(
            x,
            bad,
            channel,
            valid,
            scales,
            scale_row,
            store_mask,
            CODE == "symmetric",
            GROUPS,
            WIDTH // GROUPS,
            LOWEST,
            HIGHEST,
            CODE_STEP,
            OFFSET,
        )
    codes = tl.where(valid[None, :], codes, 0)
    store_codes(codes, payload, payload_row, store_mask, TOKENS, BITS, P, Q, QP)
