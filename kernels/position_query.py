"""Decode attention in the position-query form, for Hopper (Gluon).

With rows `T[j] = [cos, sin]` of token j, shared by all heads, and once a step and head

    W = [q0 U0 + q1 U1 ; q1 U0 - q0 U1]    (head_dim x rank)

the score of a token with latent c is `c . (T W)`: the key is never expanded, and the left operand of the product is T,
not the cache, so that codes need no conversion before tensor cores. One warp brings tiles into shared memory; two
groups of four warps work on one half of every tile each. See docs/kernels.md for what was measured.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_codes import (
    add_weighted,
    in_stored_order,
    key_layout,
    raised_bytes,
    raised_nibbles,
    scales_and_zeros,
    stored_column,
    widened,
)
from .hopper_tiles import CHANGING, load_tiles, release


@gluon.jit(do_not_specialize=CHANGING)
def position_query_kernel(
    key,
    value,
    key_scales,
    value_scales,
    cos,
    sin,
    query,
    key_up,
    heads,
    lengths,
    partial,
    lse,
    scale,
    slots,
    first,
    split_tokens,
    splits,
    query_batch_stride,
    query_head_stride,
    up_head_stride,
    up_channel_stride,
    key_batch_rows,
    key_head_rows,
    value_batch_rows,
    value_head_rows,
    rows_batch_rows,
    HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """One split of HEADS heads of a sequence. Grid `(splits, heads of the part / HEADS, B)`, 4 warps.

    Args:
        key, value: descriptors of `[rows, bytes or width]`, tiles of 128 tokens.
        key_scales, value_scales: descriptors of all scales in a row, 128 tokens a tile: fp16 for SCALES = 1, scale and
            zero as one uint32 for 2. Anything for 0.
        cos, sin: descriptors of `[rows, HEAD_DIM / 2]`, tiles of 128 tokens.
        query: `[B, Hq, 1, HEAD_DIM]`.
        key_up: `[heads of the part, HEAD_DIM, RANK]`.
        heads: int32, the layer's heads that the part has, or None.
        lengths: int32 `[B]`, places in use, or None.
        partial, lse: `[B, heads of the part, 1, 2 splits, RANK]` and the same without RANK.
        scale: of the scores, times log2(e).
        slots, first: tokens of the part, and the place of the first.
        *_rows: strides in rows of the descriptors.
    """
    split = gl.program_id(0)
    head = gl.program_id(1) * HEADS
    batch = gl.program_id(2)
    TILE: gl.constexpr = cos.block_type.shape[0]
    HALF: gl.constexpr = HEAD_DIM // 2
    ROW_TYPE: gl.constexpr = cos.dtype
    start = split * split_tokens
    end = slots
    if lengths is not None:
        end = gl.minimum(slots, gl.load(lengths + batch) - first)
    count = gl.maximum(gl.minimum(split_tokens, end - start), 0)

    key_tiles = gl.allocate_shared_memory(key.dtype, [STAGES, TILE, key.block_type.shape[1]], key.layout)
    value_tiles = gl.allocate_shared_memory(value.dtype, [STAGES, TILE, value.block_type.shape[1]], value.layout)
    key_scale_tiles = gl.allocate_shared_memory(key_scales.dtype, [STAGES, TILE], key_scales.layout)
    value_scale_tiles = gl.allocate_shared_memory(value_scales.dtype, [STAGES, TILE], value_scales.layout)
    cos_tiles = gl.allocate_shared_memory(ROW_TYPE, [ROW_STAGES, TILE, HALF], cos.layout)
    sin_tiles = gl.allocate_shared_memory(ROW_TYPE, [ROW_STAGES, TILE, HALF], sin.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, RANK], ROW_TYPE)
    cos_weights = gl.allocate_shared_memory(ROW_TYPE, [HEADS, HALF, RANK], WEIGHTS)
    sin_weights = gl.allocate_shared_memory(ROW_TYPE, [HEADS, HALF, RANK], WEIGHTS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    rows_full = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    rows_free = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    folded = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for stage in gl.static_range(ROW_STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
        mbarrier.init(rows_free.index(stage), count=2)
    mbarrier.init(folded.index(0), count=2)

    query += batch.to(gl.int64) * query_batch_stride
    key_up += head.to(gl.int64) * up_head_stride
    key_row = batch * key_batch_rows + head * key_head_rows + start
    value_row = batch * value_batch_rows + head * value_head_rows + start
    row = batch * rows_batch_rows + first + start
    out = ((batch.to(gl.int64) * gl.num_programs(1) * HEADS + head) * splits + split) * 2
    # The arguments stand in the call: constants that go through a variable become tensors.
    # fmt: off
    gl.warp_specialize([
        (attend, (0, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles, cos_weights,
                  sin_weights, full, free, rows_full, rows_free, folded, query, key_up, heads, head, scale, count,
                  partial + out * RANK, lse + out, splits, query_head_stride, up_head_stride, up_channel_stride,
                  HEAD_DIM, RANK, BITS, SCALES, HEADS, STAGES, ROW_STAGES)),
        (attend, (1, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles, cos_weights,
                  sin_weights, full, free, rows_full, rows_free, folded, query, key_up, heads, head, scale, count,
                  partial + (out + 1) * RANK, lse + out + 1, splits, query_head_stride, up_head_stride,
                  up_channel_stride, HEAD_DIM, RANK, BITS, SCALES, HEADS, STAGES, ROW_STAGES)),
        (load_tiles, (key, value, key_scales, value_scales, cos, sin, key_tiles, value_tiles, key_scale_tiles,
                      value_scale_tiles, cos_tiles, sin_tiles, full, free, rows_full, rows_free, key_row, value_row,
                      row, key_head_rows, value_head_rows, (count + TILE - 1) // TILE, SCALES, HEADS, STAGES,
                      ROW_STAGES)),
    ], [4, 1], [216, 24])
    # fmt: on


@gluon.jit
def attend(
    WHICH: gl.constexpr,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    cos_tiles,
    sin_tiles,
    cos_weights,
    sin_weights,
    full,
    free,
    rows_full,
    rows_free,
    folded,
    query,
    key_up,
    heads,
    head,
    scale,
    count,
    partial,
    lse,
    splits,
    query_head_stride,
    up_head_stride,
    up_channel_stride,
    HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """Four warps: half WHICH of every tile, 64 tokens, for all heads of the program."""
    for number in gl.static_range(HEADS):
        if number % 2 == WHICH:
            layer_head = head + number
            if heads is not None:
                layer_head = gl.load(heads + head + number)
            fold_query(
                query + layer_head.to(gl.int64) * query_head_stride,
                key_up + number * up_head_stride,
                up_channel_stride,
                scale,
                cos_weights.index(number),
                sin_weights.index(number),
                HEAD_DIM,
                RANK,
                BITS,
            )
    fence_async_shared()
    mbarrier.arrive(folded.index(0), count=1)
    mbarrier.wait(folded.index(0), 0)

    WIDTH: gl.constexpr = RANK // 2 if BITS == 4 else RANK  # of a tile in shared memory
    ROWS: gl.constexpr = WIDTH // 16  # tokens that a thread mixes
    VALUES: gl.constexpr = gl.BlockedLayout([ROWS, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lowest = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, VALUES)).reshape([64 // ROWS, ROWS])
    zeros = gl.full([64, WIDTH], 0.0, gl.float32, VALUES).reshape([64 // ROWS, ROWS, WIDTH])
    # A maximum and sums for each group of tokens that a thread mixes: nothing is reduced over threads before the end.
    top0 = gl.max(lowest, axis=1)
    sum0 = top0 * 0.0
    zero0 = sum0
    mixed0 = gl.sum(zeros, axis=1)
    high0 = mixed0
    top1 = top0
    sum1 = sum0
    zero1 = zero0
    mixed1 = mixed0
    high1 = high0
    whole = count // 128
    for tile in range(whole):
        # fmt: off
        top0, sum0, zero0, mixed0, high0, top1, sum1, zero1, mixed1, high1 = attend_tile(
            WHICH, tile, 64, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles,
            cos_weights, sin_weights, full, free, rows_full, rows_free, top0, sum0, zero0, mixed0, high0, top1, sum1,
            zero1, mixed1, high1, RANK, BITS, SCALES, HEADS, STAGES, ROW_STAGES, ROWS, VALUES, False)
        # fmt: on
    if count % 128 != 0:
        seen = count - whole * 128 - 64 * WHICH
        # fmt: off
        top0, sum0, zero0, mixed0, high0, top1, sum1, zero1, mixed1, high1 = attend_tile(
            WHICH, whole, seen, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles,
            cos_weights, sin_weights, full, free, rows_full, rows_free, top0, sum0, zero0, mixed0, high0, top1, sum1,
            zero1, mixed1, high1, RANK, BITS, SCALES, HEADS, STAGES, ROW_STAGES, ROWS, VALUES, True)
        # fmt: on
    store_partial(top0, sum0, zero0, mixed0, high0, partial, lse, BITS)
    if HEADS == 2:
        store_partial(top1, sum1, zero1, mixed1, high1, partial + splits * 2 * RANK, lse + splits * 2, BITS)


@gluon.jit
def fold_query(
    query,
    key_up,
    up_channel_stride,
    scale,
    cos_weights,
    sin_weights,
    HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
):
    """Write W of one head, columns in the order of `stored_column`."""
    HALF: gl.constexpr = HEAD_DIM // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [256 // RANK, RANK // 8], [4, 1], [1, 0])
    channel = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = stored_column(gl.arange(0, RANK, gl.SliceLayout(0, LAYOUT)), RANK, BITS)
    query0 = gl.load(query + channel).to(gl.float32)[:, None] * scale
    query1 = gl.load(query + HALF + channel).to(gl.float32)[:, None] * scale
    up = key_up + channel[:, None] * up_channel_stride + column[None, :]
    up0 = gl.load(up).to(gl.float32)
    up1 = gl.load(up + HALF * up_channel_stride).to(gl.float32)
    cos_weights.store((query0 * up0 + query1 * up1).to(cos_weights.dtype))
    sin_weights.store((query1 * up0 - query0 * up1).to(sin_weights.dtype))


@gluon.jit
def attend_tile(
    WHICH: gl.constexpr,
    tile,
    seen,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    cos_tiles,
    sin_tiles,
    cos_weights,
    sin_weights,
    full,
    free,
    rows_full,
    rows_free,
    top0,
    sum0,
    zero0,
    mixed0,
    high0,
    top1,
    sum1,
    zero1,
    mixed1,
    high1,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Half a tile for all heads; of its tokens the first `seen` count where MASKED."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK, 16])
    ROW_OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    row_stage = tile % ROW_STAGES
    mbarrier.wait(rows_full.index(row_stage), (tile // ROW_STAGES) & 1)
    cos = cos_tiles.index(row_stage).slice(64 * WHICH, 64).load(ROW_OPERAND)
    sin = sin_tiles.index(row_stage).slice(64 * WHICH, 64).load(ROW_OPERAND)
    release(rows_free.index(row_stage))
    item = tile * HEADS
    # fmt: off
    top0, sum0, zero0, mixed0, high0, cos, sin = attend_head(
        WHICH, item % STAGES, (item // STAGES) & 1, seen, cos, sin, cos_weights.index(0), sin_weights.index(0),
        key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, full, free, top0, sum0, zero0, mixed0, high0,
        RANK, BITS, SCALES, ROWS, PRODUCT, VALUES, MASKED)
    if HEADS == 2:
        item += 1
        top1, sum1, zero1, mixed1, high1, cos, sin = attend_head(
            WHICH, item % STAGES, (item // STAGES) & 1, seen, cos, sin, cos_weights.index(1), sin_weights.index(1),
            key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, full, free, top1, sum1, zero1, mixed1, high1,
            RANK, BITS, SCALES, ROWS, PRODUCT, VALUES, MASKED)
    # fmt: on
    return top0, sum0, zero0, mixed0, high0, top1, sum1, zero1, mixed1, high1


@gluon.jit
def attend_head(
    WHICH: gl.constexpr,
    stage,
    phase,
    seen,
    cos,
    sin,
    cos_weights,
    sin_weights,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    full,
    free,
    top,
    total,
    zero,
    mixed,
    high,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    ROWS: gl.constexpr,
    PRODUCT: gl.constexpr,
    VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """64 tokens of one head.

    Args:
        cos, sin: `[64, HEAD_DIM / 2]`, the left operand in registers.
        top, total, zero: `[groups]` of tokens that a thread mixes: maximum, sum of weights, sum of weighted zeros.
        mixed, high: `[groups, WIDTH]`: weighted sum of values; for 4 bits of low and of high nibbles.

    Returns:
        The sums with the tokens added, and cos and sin: what the tensor cores read must live until they have.
    """
    GROUPS: gl.constexpr = 64 // ROWS
    WIDTH: gl.constexpr = RANK // 2 if BITS == 4 else RANK
    KEYS: gl.constexpr = key_layout(WIDTH)
    TOKENS: gl.constexpr = gl.SliceLayout(1, VALUES)
    GROUP: gl.constexpr = gl.SliceLayout(1, mixed.type.layout)
    # What raised codes are above their levels.
    OFFSET: gl.constexpr = (128.0 if BITS == 4 else 32768.0) + ((8.0 if BITS == 4 else 128.0) if SCALES == 1 else 0.0)

    product = gl.zeros([64, RANK], gl.float32, PRODUCT)
    product = warpgroup_mma(cos, cos_weights, product, use_acc=False, is_async=True)
    product = warpgroup_mma(sin, sin_weights, product, is_async=True)
    mbarrier.wait(full.index(stage), phase)
    key = key_tiles.index(stage).slice(64 * WHICH, 64).load(KEYS)
    value = value_tiles.index(stage).slice(64 * WHICH, 64).load(VALUES)
    if SCALES > 0:
        key_scale, key_zero = scales_and_zeros(
            key_scale_tiles.index(stage).slice(64 * WHICH, 64), SCALES, gl.SliceLayout(1, KEYS)
        )
        value_scale, value_zero = scales_and_zeros(
            value_scale_tiles.index(stage).slice(64 * WHICH, 64), SCALES, TOKENS
        )
    release(free.index(stage))
    product, cos, sin = warpgroup_mma_wait(0, deps=[product, cos, sin])

    low, upper = in_stored_order(product, 64, RANK, BITS)
    low = gl.convert_layout(low, KEYS)
    # Sums within a thread first: over the four threads of a row only once, with the scales in.
    if BITS == 16:
        scores = gl.sum(low * widened(key), axis=1)
    elif BITS == 8 and SCALES == 1:
        scores = gl.sum(low * (raised_bytes(key, SCALES) - OFFSET), axis=1)
        scores *= gl.convert_layout(key_scale, scores.type.layout)
    else:
        if BITS == 4:
            upper = gl.convert_layout(upper, KEYS)
            low_key, upper_key = raised_nibbles(key)
            raised = gl.sum((low * low_key).reshape([64, 4, WIDTH // 4]), axis=2)
            raised += gl.sum((upper * upper_key).reshape([64, 4, WIDTH // 4]), axis=2)
            plain = gl.sum(low.reshape([64, 4, WIDTH // 4]), axis=2)
            plain += gl.sum(upper.reshape([64, 4, WIDTH // 4]), axis=2)
            shift = key_zero - OFFSET * key_scale if SCALES == 2 else -OFFSET * key_scale
        else:
            raised = gl.sum((low * (raised_bytes(key, SCALES) - OFFSET)).reshape([64, 4, WIDTH // 4]), axis=2)
            plain = gl.sum(low.reshape([64, 4, WIDTH // 4]), axis=2)
            shift = key_zero
        QUARTERS: gl.constexpr = gl.SliceLayout(1, raised.type.layout)
        factor = gl.convert_layout(key_scale, QUARTERS)[:, None]
        scores = gl.sum(raised * factor + plain * gl.convert_layout(shift, QUARTERS)[:, None], axis=1)
    scores = gl.convert_layout(scores, TOKENS)
    if MASKED:
        inside = gl.arange(0, 64, TOKENS) < seen
        scores = gl.where(inside, scores, float("-inf"))
        if BITS == 16:
            value = gl.where(inside[:, None], value, 0.0)
        else:
            value_scale = gl.where(inside, value_scale, 0.0)
            value_zero = gl.where(inside, value_zero, 0.0)

    scores = scores.reshape([GROUPS, ROWS])
    new_top = gl.maximum(top, gl.convert_layout(gl.max(scores, axis=1), top.type.layout))
    decay = gl.exp2(top - new_top)
    weights = gl.exp2(scores - gl.convert_layout(new_top, gl.SliceLayout(1, scores.type.layout))[:, None])
    total = total * decay + gl.convert_layout(gl.sum(weights, axis=1), total.type.layout)
    base = gl.convert_layout(decay, GROUP)[:, None]
    if SCALES > 0:
        if SCALES == 2:
            value_zero = gl.convert_layout(value_zero.reshape([GROUPS, ROWS]), weights.type.layout)
            zero = zero * decay + gl.convert_layout(gl.sum(weights * value_zero, axis=1), zero.type.layout)
        weights *= gl.convert_layout(value_scale.reshape([GROUPS, ROWS]), weights.type.layout)
        shift = gl.convert_layout(gl.sum(weights, axis=1), GROUP)[:, None] * -OFFSET
    if BITS == 4:
        low_value, upper_value = raised_nibbles(value)
        mixed = add_weighted(mixed * base + shift, weights, low_value, ROWS)
        high = add_weighted(high * base + shift, weights, upper_value, ROWS)
    elif BITS == 8:
        mixed = add_weighted(mixed * base + shift, weights, raised_bytes(value, SCALES), ROWS)
    else:
        mixed = add_weighted(mixed * base, weights, widened(value), ROWS)
    return new_top, total, zero, mixed, high, cos, sin


@gluon.jit
def store_partial(top, total, zero, mixed, high, partial, lse, BITS: gl.constexpr):
    """Merge the groups of tokens and write the result of a split, -inf where it saw nothing."""
    WIDTH: gl.constexpr = mixed.shape[1]
    highest = gl.max(top, axis=0)
    factor = gl.exp2(top - highest)
    whole = gl.sum(total * factor, axis=0)
    offset = gl.sum(zero * factor, axis=0)
    inverse = 1.0 / gl.maximum(whole, 1.0e-30)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, mixed.type.layout))[:, None]
    out = (gl.sum(mixed * factor, axis=0) + offset) * inverse
    gl.store(partial + gl.arange(0, WIDTH, out.type.layout), out)
    if BITS == 4:
        out = (gl.sum(high * factor, axis=0) + offset) * inverse
        gl.store(partial + WIDTH + gl.arange(0, WIDTH, out.type.layout), out)
    gl.store(lse, gl.where(whole > 0, highest + gl.log2(gl.maximum(whole, 1.0e-30)), float("-inf")))
