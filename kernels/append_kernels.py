"""Triton kernels that code new tokens and write them where a cache keeps them."""

import triton
import triton.language as tl

from .encode_tile import encode_tile


@triton.jit(do_not_specialize=["position", "other_position", "count", "capacity"])
def append_kernel(
    tokens,
    other_tokens,
    payload,
    other_payload,
    scales,
    other_scales,
    head_scales,
    other_head_scales,
    start,
    other_start,
    rotation,
    midpoints,
    code_squares,
    position,
    other_position,
    count,
    capacity,
    token_stride_b,
    token_stride_h,
    token_stride_n,
    token_stride_c,
    payload_stride_b,
    payload_stride_h,
    payload_stride_n,
    scales_stride_b,
    scales_stride_h,
    scales_stride_n,
    SIDES: tl.constexpr,
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
    """Grid (blocks of `TOKENS` tokens, heads, batch times `SIDES`).

    Token n goes to slot `start + position + n`; what would go past the buffers' ends is not written. The `other` side
    has strides and capacity of the first. Pointers are None for what a code does not need.
    """
    head = tl.program_id(1).to(tl.int64)
    batch = (tl.program_id(2) // SIDES).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    if SIDES == 2 and tl.program_id(2) % 2 == 1:
        tokens = other_tokens
        payload = other_payload
        position = other_position
        if scales is not None:
            scales = other_scales
        if head_scales is not None:
            head_scales = other_head_scales
        if start is not None:
            start = other_start
    slot = n + position
    if start is not None:
        slot += tl.load(start)
    head_scale = 1.0
    if head_scales is not None:
        head_scale = tl.load(head_scales + head)
    encode_tile(
        tokens + batch * token_stride_b + head * token_stride_h,
        n * token_stride_n,
        n < count,
        token_stride_c,
        payload + batch * payload_stride_b + head * payload_stride_h,
        slot * payload_stride_n,
        scales,
        batch * scales_stride_b + head * scales_stride_h + slot * scales_stride_n,
        (n < count) & (slot >= 0) & (slot < capacity),
        head_scale,
        rotation,
        midpoints,
        code_squares,
        TOKENS,
        CODE,
        BITS,
        WIDTH,
        GROUPS,
        LOWEST,
        HIGHEST,
        CODE_STEP,
        OFFSET,
        P,
        Q,
        QP,
        BLOCK,
        BLOCK_PADDED,
        STEP,
    )


@triton.jit(do_not_specialize=["position", "capacity", "rows", "count"])
def project_append_kernel(
    inputs,
    down,
    latents,
    payload,
    scales,
    head_scales,
    start,
    rotation,
    midpoints,
    code_squares,
    position,
    capacity,
    rows,
    count,
    input_stride_b,
    input_stride_n,
    down_stride_h,
    down_stride_r,
    latent_stride_b,
    latent_stride_h,
    payload_stride_b,
    payload_stride_h,
    payload_stride_n,
    scales_stride_b,
    scales_stride_h,
    scales_stride_n,
    ROWS: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    IN_STEP: tl.constexpr,
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
    """Grid (blocks of `ROWS` tokens of all sequences, heads): `latents = inputs @ down^T`, then as `append_kernel`.

    A tile has `ROWS` rows however many tokens there are, so that sums have one order and a token's latent does not
    depend on the others.
    """
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    batch, n = (row // count).to(tl.int64), (row % count).to(tl.int64)
    channel = tl.arange(0, WIDTH_PADDED)
    k = tl.arange(0, IN_STEP)
    x_row = inputs + (batch * input_stride_b + n * input_stride_n)[:, None]
    down_row = down + head * down_stride_h + channel[None, :] * down_stride_r
    projected = tl.zeros([ROWS, WIDTH_PADDED], tl.float32)
    for begin in range(0, IN_FEATURES, IN_STEP):
        inside = begin + k < IN_FEATURES
        x = tl.load(x_row + (begin + k)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(down_row + (begin + k)[:, None], mask=inside[:, None] & (channel < WIDTH)[None, :], other=0.0)
        projected = tl.dot(x, weight, projected, input_precision="ieee")
    latent_row = latents + (batch * latent_stride_b + head * latent_stride_h + n * WIDTH)[:, None]
    tl.store(
        latent_row + channel[None, :],
        projected.to(latents.dtype.element_ty),
        mask=(row < rows)[:, None] & (channel < WIDTH)[None, :],
    )
    tl.debug_barrier()  # what one thread wrote, others read now
    head_scale = 1.0
    if head_scales is not None:
        head_scale = tl.load(head_scales + head)
    for part in range(0, ROWS, TOKENS):
        if first + part < rows:
            coded = first + part + tl.arange(0, TOKENS)
            coded_batch, coded_n = (coded // count).to(tl.int64), (coded % count).to(tl.int64)
            slot = coded_n + position
            if start is not None:
                slot += tl.load(start)
            encode_tile(
                latents,
                coded_batch * latent_stride_b + head * latent_stride_h + coded_n * WIDTH,
                coded < rows,
                1,
                payload,
                coded_batch * payload_stride_b + head * payload_stride_h + slot * payload_stride_n,
                scales,
                coded_batch * scales_stride_b + head * scales_stride_h + slot * scales_stride_n,
                (coded < rows) & (slot >= 0) & (slot < capacity),
                head_scale,
                rotation,
                midpoints,
                code_squares,
                TOKENS,
                CODE,
                BITS,
                WIDTH,
                GROUPS,
                LOWEST,
                HIGHEST,
                CODE_STEP,
                OFFSET,
                P,
                Q,
                QP,
                BLOCK,
                BLOCK_PADDED,
                STEP,
            )
