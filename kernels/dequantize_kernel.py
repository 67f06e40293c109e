"""Triton kernel that reads packed tokens back."""

import triton
import triton.language as tl


@triton.jit
def codes_at(payload, channel, mask, BITS: tl.constexpr, PADDED: tl.constexpr):
    """Codes of channels `channel[None, :]` of the tokens at `payload[:, None]`, in the layout of `kernels.packing`."""
    if BITS == 8:
        codes = tl.load(payload + channel, mask=mask, other=0).to(tl.int32)
    elif BITS == 3:
        low = tl.load(payload + channel % (PADDED // 4), mask=mask, other=0).to(tl.int32)
        high = tl.load(payload + PADDED // 4 + channel % (PADDED // 8), mask=mask, other=0).to(tl.int32)
        codes = ((low >> (channel // (PADDED // 4) * 2)) & 3) | (((high >> (channel // (PADDED // 8))) & 1) << 2)
    else:
        in_plane: tl.constexpr = PADDED * BITS // 8
        byte = tl.load(payload + channel % in_plane, mask=mask, other=0).to(tl.int32)
        codes = (byte >> (channel // in_plane * BITS)) & (2**BITS - 1)
    return codes


@triton.jit
def from_fp8(bits):
    """fp32 numbers of float8_e4m3fn bits, by integer arithmetic: not every device has the conversion."""
    size = bits & 0x7F
    normal = ((size << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # below 2^-6 in steps of 2^-9
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def numbers_at(
    payload,
    scales,
    head_scale,
    levels,
    channel,
    mask,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODE_STEP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """`scale * level + zero` in fp32 of some channels, `payload` and `scales` being pointers `[tokens, 1]`."""
    if CODE == "float":
        numbers = tl.load(payload + channel, mask=mask, other=0.0).to(tl.float32)
    elif CODE == "fp8":
        numbers = from_fp8(codes_at(payload, channel, mask, BITS, PADDED)) * head_scale
    else:
        codes = codes_at(payload, channel, mask, BITS, PADDED)
        group = channel // GROUP_SIZE
        scale = tl.load(scales + group, mask=mask, other=0.0).to(tl.float32)
        if CODE == "codebook":
            numbers = tl.load(levels + codes) * scale
        elif CODE == "asymmetric":
            zero = tl.load(scales + GROUPS + group, mask=mask, other=0.0).to(tl.float32)
            numbers = codes.to(tl.float32) * scale + zero
        else:
            if BITS == 8:
                codes = tl.where(codes >= 128, codes - 256, codes)
            numbers = (codes * CODE_STEP - OFFSET).to(tl.float32) * scale
    return numbers


@triton.jit(do_not_specialize=["count"])
def dequantize_kernel(
    payload,
    scales,
    head_scales,
    levels,
    rotation,
    out,
    count,
    payload_stride_b,
    payload_stride_h,
    payload_stride_n,
    scales_stride_b,
    scales_stride_h,
    scales_stride_n,
    out_stride_b,
    out_stride_h,
    out_stride_n,
    TOKENS: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODE_STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid (blocks of `TOKENS` tokens times blocks of channels, heads, batch).

    A block of channels is all of them, or `BLOCK` that a rotation `[BLOCK, BLOCK]` mixed. `COLUMNS` of them, with
    padding, are written; `STEP` at a time are turned back.
    """
    blocks: tl.constexpr = 1 if BLOCK == 0 else WIDTH // BLOCK
    size: tl.constexpr = WIDTH if BLOCK == 0 else BLOCK
    n = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(0) % blocks * size
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    there = (n < count)[:, None]
    payload += batch * payload_stride_b + head * payload_stride_h + n[:, None] * payload_stride_n
    if scales is not None:
        scales += batch * scales_stride_b + head * scales_stride_h + n[:, None] * scales_stride_n
    head_scale = 1.0
    if head_scales is not None:
        head_scale = tl.load(head_scales + head)
    column = tl.arange(0, COLUMNS)[None, :]
    if BLOCK == 0:
        numbers = numbers_at(
            payload,
            scales,
            head_scale,
            levels,
            column,
            there & (column < WIDTH),
            CODE,
            BITS,
            PADDED,
            GROUPS,
            GROUP_SIZE,
            CODE_STEP,
            OFFSET,
        )
    else:
        numbers = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for begin in range(0, BLOCK, STEP):
            k = begin + tl.arange(0, STEP)
            part = numbers_at(
                payload,
                scales,
                head_scale,
                levels,
                (first + k)[None, :],
                there & (k < BLOCK)[None, :],
                CODE,
                BITS,
                PADDED,
                GROUPS,
                GROUP_SIZE,
                CODE_STEP,
                OFFSET,
            )
            part = tl.where((k < BLOCK)[None, :], part, 0.0)
            turns = tl.load(
                rotation + column * BLOCK + k[:, None], mask=(k < BLOCK)[:, None] & (column < BLOCK), other=0.0
            )
            # As exact as fp32, on tensor cores.
            numbers = tl.dot(part, turns, numbers, input_precision="tf32x3")
    out += batch * out_stride_b + head * out_stride_h + n[:, None] * out_stride_n
    tl.store(out + first + column, numbers.to(out.dtype.element_ty), mask=there & (column < size))
