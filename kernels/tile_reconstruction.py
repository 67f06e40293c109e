"""Decode attention of grouped queries by expanding every tile of keys once for its group, for Hopper (Gluon).

A tile of latents becomes keys by tensor cores, is rotated in registers, and meets all query heads of the group there:
nothing of it is written to memory. Values stay latent: the tile is the left operand of a product with the softmax
weights. Warps share the work as in the position-query kernel.
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
    in_product_order,
    key_layout,
    raised_bytes,
    raised_nibbles,
    scales_and_zeros,
    stored_column,
    widened,
)
from .hopper_tiles import CHANGING, group_barrier, load_tiles, release


@gluon.jit(do_not_specialize=CHANGING)
def tile_reconstruction_kernel(
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
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """One split of a KV head of a sequence. Grid `(splits, heads of the part, B)`, 4 warps.

    Arguments are those of `position_query_kernel`, but for

    Args:
        partial, lse: `[B, heads of the part times GROUP, 1, 2 splits, RANK]` and the same without RANK.
        GROUP: query heads of a KV head; QUERIES: 8 or 16, at least as many.
    """
    split = gl.program_id(0)
    head = gl.program_id(1)
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
    UP: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, RANK], ROW_TYPE)
    up_halves = gl.allocate_shared_memory(ROW_TYPE, [2, HALF, RANK], UP)
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, HALF], ROW_TYPE)
    query_halves = gl.allocate_shared_memory(ROW_TYPE, [2, QUERIES, HALF], QUERY)
    # What each group of warps hands to the tensor cores: weights of 64 tokens, and their values as floats.
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, 64], ROW_TYPE)
    weights = gl.allocate_shared_memory(ROW_TYPE, [2, QUERIES, 64], WEIGHTS)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, RANK], ROW_TYPE)
    floats = gl.allocate_shared_memory(ROW_TYPE, [2, 64, RANK], FLOATS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    rows_full = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    rows_free = gl.allocate_shared_memory(gl.int64, [ROW_STAGES, 1], BARRIER)
    prepared = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for stage in gl.static_range(ROW_STAGES):
        mbarrier.init(rows_full.index(stage), count=1)
        mbarrier.init(rows_free.index(stage), count=2)
    mbarrier.init(prepared.index(0), count=2)

    layer_head = head
    if heads is not None:
        layer_head = gl.load(heads + head)
    query += batch.to(gl.int64) * query_batch_stride + layer_head.to(gl.int64) * GROUP * query_head_stride
    key_up += head.to(gl.int64) * up_head_stride
    key_row = batch * key_batch_rows + head * key_head_rows + start
    value_row = batch * value_batch_rows + head * value_head_rows + start
    row = batch * rows_batch_rows + first + start
    out = ((batch.to(gl.int64) * gl.num_programs(1) + head) * GROUP * splits + split) * 2
    # The arguments stand in the call: constants that go through a variable become tensors.
    # fmt: off
    gl.warp_specialize([
        (attend, (0, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles, up_halves,
                  query_halves, weights, floats, full, free, rows_full, rows_free, prepared, query, key_up, scale,
                  count, partial + out * RANK, lse + out, splits, query_head_stride, up_channel_stride,
                  HEAD_DIM, RANK, BITS, SCALES, GROUP, QUERIES, STAGES, ROW_STAGES)),
        (attend, (1, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles, up_halves,
                  query_halves, weights, floats, full, free, rows_full, rows_free, prepared, query, key_up, scale,
                  count, partial + (out + 1) * RANK, lse + out + 1, splits, query_head_stride, up_channel_stride,
                  HEAD_DIM, RANK, BITS, SCALES, GROUP, QUERIES, STAGES, ROW_STAGES)),
        (load_tiles, (key, value, key_scales, value_scales, cos, sin, key_tiles, value_tiles, key_scale_tiles,
                      value_scale_tiles, cos_tiles, sin_tiles, full, free, rows_full, rows_free, key_row, value_row,
                      row, key_head_rows, value_head_rows, (count + TILE - 1) // TILE, SCALES, 1, STAGES,
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
    up_halves,
    query_halves,
    weights,
    floats,
    full,
    free,
    rows_full,
    rows_free,
    prepared,
    query,
    key_up,
    scale,
    count,
    partial,
    lse,
    splits,
    query_head_stride,
    up_channel_stride,
    HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """Four warps: half WHICH of every tile, 64 tokens; they also bring half WHICH of the channels of U and queries."""
    HALF: gl.constexpr = HEAD_DIM // 2
    UP: gl.constexpr = gl.BlockedLayout([1, 2], [256 // RANK, RANK // 8], [4, 1], [1, 0])
    channel = HALF * WHICH + gl.arange(0, HALF, gl.SliceLayout(1, UP))
    column = gl.arange(0, RANK, gl.SliceLayout(0, UP))
    if BITS < 16:
        column = stored_column(column, RANK, BITS)
    up_halves.index(WHICH).store(gl.load(key_up + channel[:, None] * up_channel_stride + column[None, :]))
    QUERY: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    member = gl.arange(0, QUERIES, gl.SliceLayout(1, QUERY))
    channel = HALF * WHICH + gl.arange(0, HALF, gl.SliceLayout(0, QUERY))
    rows = query + member[:, None] * query_head_stride + channel[None, :]
    query_halves.index(WHICH).store(gl.load(rows, mask=(member < GROUP)[:, None], other=0.0))
    fence_async_shared()
    mbarrier.arrive(prepared.index(0), count=1)
    mbarrier.wait(prepared.index(0), 0)

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(0, SCORES))
    # Sums over tokens stay with the threads that have the tokens, to be added up at the end.
    total = gl.zeros([64, QUERIES], gl.float32, SCORES)
    zero = gl.zeros([64, QUERIES], gl.float32, SCORES)
    mixed = gl.zeros([RANK, QUERIES], gl.float32, SCORES)
    whole = count // 128
    for tile in range(whole):
        # fmt: off
        top, total, zero, mixed = attend_tile(
            WHICH, tile, 64, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles,
            up_halves, query_halves, weights, floats, full, free, rows_full, rows_free, scale, top, total, zero, mixed,
            HEAD_DIM, RANK, BITS, SCALES, QUERIES, STAGES, ROW_STAGES, SCORES, False)
        # fmt: on
    if count % 128 != 0:
        seen = count - whole * 128 - 64 * WHICH
        # fmt: off
        top, total, zero, mixed = attend_tile(
            WHICH, whole, seen, key_tiles, value_tiles, key_scale_tiles, value_scale_tiles, cos_tiles, sin_tiles,
            up_halves, query_halves, weights, floats, full, free, rows_full, rows_free, scale, top, total, zero, mixed,
            HEAD_DIM, RANK, BITS, SCALES, QUERIES, STAGES, ROW_STAGES, SCORES, True)
        # fmt: on

    sums = gl.sum(total, axis=0)
    inverse = 1.0 / gl.maximum(sums, 1.0e-30)
    mixed = (mixed + gl.sum(zero, axis=0)[None, :]) * inverse[None, :]
    member = gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES))
    rank = gl.arange(0, RANK, gl.SliceLayout(1, SCORES))
    target = partial + member[None, :] * (splits * 2 * RANK) + rank[:, None]
    gl.store(target, mixed, mask=(member < GROUP)[None, :])
    logarithm = gl.where(sums > 0, top + gl.log2(gl.maximum(sums, 1.0e-30)), float("-inf"))
    gl.store(lse + member * (splits * 2), logarithm, mask=member < GROUP)


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
    up_halves,
    query_halves,
    weights,
    floats,
    full,
    free,
    rows_full,
    rows_free,
    scale,
    top,
    total,
    zero,
    mixed,
    HEAD_DIM: gl.constexpr,
    RANK: gl.constexpr,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """64 tokens; where MASKED, the first `seen` of them count."""
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = RANK // 2 if BITS == 4 else RANK
    EXPANDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LATENT: gl.constexpr = gl.DotOperandLayout(0, EXPANDED, 2)
    KEYS: gl.constexpr = key_layout(WIDTH)
    VALUES: gl.constexpr = gl.BlockedLayout([WIDTH // 16, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    ROW_TYPE: gl.constexpr = cos_tiles.dtype
    # What raised codes are above their levels.
    OFFSET: gl.constexpr = (128.0 if BITS == 4 else 32768.0) + ((8.0 if BITS == 4 else 128.0) if SCALES == 1 else 0.0)
    stage = tile % STAGES
    mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
    if BITS == 16:
        latent = key_tiles.index(stage).slice(64 * WHICH, 64).load(LATENT)
    else:
        codes = key_tiles.index(stage).slice(64 * WHICH, 64).load(KEYS)
        if SCALES == 2:
            key_scale, key_zero = scales_and_zeros(
                key_scale_tiles.index(stage).slice(64 * WHICH, 64), SCALES, gl.SliceLayout(1, KEYS)
            )
            shift = (key_zero - OFFSET * key_scale)[:, None]
            factor = key_scale[:, None]
        if BITS == 4:
            low, high = raised_nibbles(codes)
        else:
            low = raised_bytes(codes, SCALES)
            high = low
        # Levels are whole numbers that 16-bit floats hold: a scale alone is left to the scores.
        if SCALES == 2:
            low = low * factor + shift
            high = high * factor + shift
        else:
            low = low - OFFSET
            high = high - OFFSET
        latent = gl.convert_layout(in_product_order(low, high, 64, RANK, BITS).to(ROW_TYPE), LATENT)

    first = gl.zeros([64, HALF], gl.float32, EXPANDED)
    second = gl.zeros([64, HALF], gl.float32, EXPANDED)
    first = warpgroup_mma(latent, up_halves.index(0).permute([1, 0]), first, use_acc=False, is_async=True)
    second = warpgroup_mma(latent, up_halves.index(1).permute([1, 0]), second, use_acc=False, is_async=True)
    row_stage = tile % ROW_STAGES
    mbarrier.wait(rows_full.index(row_stage), (tile // ROW_STAGES) & 1)
    cos = cos_tiles.index(row_stage).slice(64 * WHICH, 64).load(EXPANDED)
    sin = sin_tiles.index(row_stage).slice(64 * WHICH, 64).load(EXPANDED)
    release(rows_free.index(row_stage))
    first, second, latent = warpgroup_mma_wait(0, deps=[first, second, latent])
    cos = widened(cos)
    sin = widened(sin)
    ROTATED: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    rotated = gl.convert_layout((first * cos - second * sin).to(ROW_TYPE), ROTATED)
    other = gl.convert_layout((second * cos + first * sin).to(ROW_TYPE), ROTATED)
    scores = gl.zeros([64, QUERIES], gl.float32, SCORES)
    scores = warpgroup_mma(rotated, query_halves.index(0).permute([1, 0]), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(other, query_halves.index(1).permute([1, 0]), scores, is_async=True)

    # Values as floats where the tensor cores cannot read them from the tile as they are.
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORES)
    value_tile = value_tiles.index(stage).slice(64 * WHICH, 64)
    own_values = floats.index(WHICH)
    if BITS < 16:
        codes = value_tile.load(VALUES)
        if BITS == 4:
            low, high = raised_nibbles(codes)
            own_values.slice(0, RANK // 2, dim=1).store((low - OFFSET).to(ROW_TYPE))
            own_values.slice(RANK // 2, RANK // 2, dim=1).store((high - OFFSET).to(ROW_TYPE))
        else:
            own_values.store((raised_bytes(codes, SCALES) - OFFSET).to(ROW_TYPE))
        value_scale, value_zero = scales_and_zeros(
            value_scale_tiles.index(stage).slice(64 * WHICH, 64), SCALES, TOKENS
        )
    elif MASKED:
        inside = gl.arange(0, 64, gl.SliceLayout(1, VALUES)) < seen
        own_values.store(gl.where(inside[:, None], value_tile.load(VALUES), 0.0))
    scores, rotated, other = warpgroup_mma_wait(0, deps=[scores, rotated, other])
    scores *= scale
    if SCALES == 1:
        key_scale, key_zero = scales_and_zeros(key_scale_tiles.index(stage).slice(64 * WHICH, 64), SCALES, TOKENS)
        scores *= key_scale[:, None]
    if MASKED:
        inside = gl.arange(0, 64, TOKENS) < seen
        scores = gl.where(inside[:, None], scores, float("-inf"))
        if BITS < 16:
            value_scale = gl.where(inside, value_scale, 0.0)
            value_zero = gl.where(inside, value_zero, 0.0)
    new_top = gl.maximum(top, gl.max(scores, axis=0))
    decay = gl.exp2(top - new_top)[None, :]
    likely = gl.exp2(scores - new_top[None, :])
    total = total * decay + likely
    if SCALES == 2:
        zero = zero * decay + likely * value_zero[:, None]
    if BITS < 16:
        likely *= value_scale[:, None]
    weights.index(WHICH).store(likely.to(ROW_TYPE).permute([1, 0]))
    fence_async_shared()
    group_barrier()
    mixed = mixed * decay
    own_weights = weights.index(WHICH).permute([1, 0])
    if BITS == 16 and not MASKED:
        mixed = warpgroup_mma(value_tile.permute([1, 0]), own_weights, mixed, is_async=True)
    else:
        mixed = warpgroup_mma(own_values.permute([1, 0]), own_weights, mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, deps=[mixed])
    release(free.index(stage))
    return new_top, total, zero, mixed
