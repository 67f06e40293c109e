"""Decode attention of grouped queries by expanding every tile of keys once for its group, for Hopper (Gluon).

A tile of latents becomes keys by tensor cores, is normalised and rotated in registers, and meets all query heads of
the group there: nothing of it is written to memory. Values stay latent: the tile is the left operand of a product with
the softmax weights.

One warp brings tiles of 64 tokens into shared memory; GROUPS groups of four warps take them in turn, HEADS heads of
a tile one after the other, so that each group has one head throughout and rotary rows are brought once for all heads.
"""

# No postponed annotations: aggregates of Triton 3.6 read theirs as types.
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
    raised_offset,
    scales_and_zeros,
    stored_column,
    true_column,
    widened,
)
from .hopper_tiles import CHANGING, Form, aggregate, allocate_tiles, group_barrier, load_tiles, release, seen_slots


@aggregate
class Operands:
    """Shared memory beside the tiles. Channels lie in parts of CHUNK, those of the first half of a head first.

    Attributes:
        up: `[HEADS HEAD_DIM / CHUNK, CHUNK, KEY_RANK]`.
        query: `[HEADS HEAD_DIM / CHUNK, QUERIES, CHUNK]`.
        bias: fp32 `[HEADS HEAD_DIM / CHUNK, CHUNK]`, of keys.
        norm: fp32 `[HEAD_DIM / CHUNK, CHUNK]`, factors of a norm before the rotation.
        prepared: a barrier that says that all of these are there.
    """

    up: gl.shared_memory_descriptor
    query: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    norm: gl.shared_memory_descriptor
    prepared: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, up, query, bias, norm, prepared):
        self.up = up
        self.query = query
        self.bias = bias
        self.norm = norm
        self.prepared = prepared


@aggregate
class Work:
    """How a program is divided: see the kernel's constants."""

    GROUP: gl.constexpr
    QUERIES: gl.constexpr
    GROUPS: gl.constexpr
    HEADS: gl.constexpr
    CHUNK: gl.constexpr
    BIAS: gl.constexpr
    NORM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUP, QUERIES, GROUPS, HEADS, CHUNK, BIAS, NORM):
        self.GROUP = gl.constexpr(GROUP)
        self.QUERIES = gl.constexpr(QUERIES)
        self.GROUPS = gl.constexpr(GROUPS)
        self.HEADS = gl.constexpr(HEADS)
        self.CHUNK = gl.constexpr(CHUNK)
        self.BIAS = gl.constexpr(BIAS)
        self.NORM = gl.constexpr(NORM)


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
    key_bias,
    norm_weight,
    mask,
    heads,
    lengths,
    starts,
    partial,
    lse,
    scale,
    norm_epsilon,
    slots,
    first,
    split_tokens,
    splits,
    key_width,
    value_width,
    query_batch_stride,
    query_head_stride,
    up_head_stride,
    up_channel_stride,
    bias_head_stride,
    mask_batch_stride,
    key_batch_rows,
    key_head_rows,
    value_batch_rows,
    value_head_rows,
    rows_batch_rows,
    HEAD_DIM: gl.constexpr,
    KEY_RANK: gl.constexpr,
    VALUE_RANK: gl.constexpr,
    KEY_BITS: gl.constexpr,
    VALUE_BITS: gl.constexpr,
    KEY_SCALES: gl.constexpr,
    VALUE_SCALES: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    GROUPS: gl.constexpr,
    CHUNK: gl.constexpr,
    NORM: gl.constexpr,
):
    """One split of HEADS KV heads of a sequence. Grid `(splits, heads of the part / HEADS, B)`, 4 warps.

    Arguments are those of `position_query_kernel`, but for

    Args:
        key ... sin: descriptors of tiles of 64 tokens; VALUE_RANK is 64 or more.
        key_bias: `[heads of the part, HEAD_DIM]`, or None.
        norm_weight: `[HEAD_DIM]` of an RMS norm of expanded keys, before the rotation for NORM = 1, behind it for 2;
            None for 0.
        norm_epsilon: added to the mean square.
        partial, lse: `[B, heads of the part times GROUP, 1, GROUPS / HEADS splits, value_width]` and the same without
            the last.
        GROUP: query heads of a KV head; QUERIES: 8 or 16, at least as many.
        GROUPS: of four warps, 2 to 4; HEADS divides it.
        CHUNK: rotary pairs of a head that are worked at a time, 32 or 64.
    """
    split = gl.program_id(0)
    head = gl.program_id(1) * HEADS
    batch = gl.program_id(2)
    TILE: gl.constexpr = cos.block_type.shape[0]
    LANES: gl.constexpr = GROUPS // HEADS
    form = Form(HEAD_DIM, KEY_RANK, VALUE_RANK, KEY_BITS, VALUE_BITS, KEY_SCALES, VALUE_SCALES)
    work = Work(GROUP, QUERIES, GROUPS, HEADS, CHUNK, key_bias is not None, NORM)
    start, count, hidden = seen_slots(lengths, starts, batch, slots, first, split * split_tokens, split_tokens, TILE)
    tiles = allocate_tiles(key, value, key_scales, value_scales, cos, 1, HEADS, STAGES, ROW_STAGES)
    operands = allocate_operands(cos.dtype, form, work)

    query += batch.to(gl.int64) * query_batch_stride
    key_row = batch * key_batch_rows + head * key_head_rows + start
    value_row = batch * value_batch_rows + head * value_head_rows + start
    row = batch * rows_batch_rows + first + start
    if mask is not None:
        mask += batch.to(gl.int64) * mask_batch_stride + first + start
    row_splits = splits * LANES
    out = (batch.to(gl.int64) * gl.num_programs(1) * HEADS + head) * GROUP * row_splits + split * LANES
    partial += out * value_width
    lse += out
    # The arguments stand in the calls: constants that go through a variable become tensors.
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize([
            (attend, (0, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (1, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (load_tiles, (key, value, key_scales, value_scales, cos, sin, tiles, key_row, value_row, row,
                          key_head_rows, value_head_rows, count, form, HEADS)),
        ], [4, 1], [216, 24])
    elif GROUPS == 3:
        gl.warp_specialize([
            (attend, (0, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (1, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (2, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (load_tiles, (key, value, key_scales, value_scales, cos, sin, tiles, key_row, value_row, row,
                          key_head_rows, value_head_rows, count, form, HEADS)),
        ], [4, 4, 1], [160, 160, 24])
    else:
        gl.warp_specialize([
            (attend, (0, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (1, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (2, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (attend, (3, tiles, operands, form, work, query, key_up, key_bias, norm_weight, mask, heads, head, partial,
                      lse, scale, norm_epsilon, count, hidden, row_splits, key_width, value_width, query_head_stride,
                      up_head_stride, up_channel_stride, bias_head_stride)),
            (load_tiles, (key, value, key_scales, value_scales, cos, sin, tiles, key_row, value_row, row,
                          key_head_rows, value_head_rows, count, form, HEADS)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])
    # fmt: on


@gluon.jit
def allocate_operands(ROW_TYPE: gl.constexpr, form, work):
    """Shared memory for `Operands`."""
    PARTS: gl.constexpr = form.HEAD_DIM // work.CHUNK
    UP: gl.constexpr = gl.NVMMASharedLayout.get_default_for([work.CHUNK, form.KEY_RANK], ROW_TYPE)
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([work.QUERIES, work.CHUNK], ROW_TYPE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    up = gl.allocate_shared_memory(ROW_TYPE, [work.HEADS * PARTS, work.CHUNK, form.KEY_RANK], UP)
    query = gl.allocate_shared_memory(ROW_TYPE, [work.HEADS * PARTS, work.QUERIES, work.CHUNK], QUERY)
    bias = up  # none
    if work.BIAS:
        bias = gl.allocate_shared_memory(gl.float32, [work.HEADS * PARTS, work.CHUNK], PLAIN)
    norm = up  # none
    if work.NORM == 1:
        norm = gl.allocate_shared_memory(gl.float32, [PARTS, work.CHUNK], PLAIN)
    prepared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(prepared.index(0), count=work.GROUPS)
    return Operands(up, query, bias, norm, prepared)


@gluon.jit
def attend(
    WHICH: gl.constexpr,
    tiles,
    operands,
    form,
    work,
    query,
    key_up,
    key_bias,
    norm_weight,
    mask,
    heads,
    head,
    partial,
    lse,
    scale,
    norm_epsilon,
    count,
    hidden,
    row_splits,
    key_width,
    value_width,
    query_head_stride,
    up_head_stride,
    up_channel_stride,
    bias_head_stride,
):
    """Four warps: every GROUPS-th tile of a head."""
    QUERIES: gl.constexpr = work.QUERIES
    HEAD: gl.constexpr = WHICH % work.HEADS
    LANE: gl.constexpr = WHICH // work.HEADS
    LANES: gl.constexpr = work.GROUPS // work.HEADS
    layer_head = head + HEAD
    if heads is not None:
        layer_head = gl.load(heads + head + HEAD)
    # fmt: off
    prepare(HEAD, LANE, LANES, operands, form, work,
            query + layer_head.to(gl.int64) * work.GROUP * query_head_stride,
            key_up + (head + HEAD).to(gl.int64) * up_head_stride, key_bias, norm_weight,
            (head + HEAD) * bias_head_stride, key_width, query_head_stride, up_channel_stride)
    # fmt: on
    fence_async_shared()
    mbarrier.arrive(operands.prepared.index(0), count=1)
    mbarrier.wait(operands.prepared.index(0), 0)

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    # What the group hands to the tensor cores: weights of its tokens, and their values where these are codes.
    ROW_TYPE: gl.constexpr = tiles.rows.dtype
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, 64], ROW_TYPE)
    FLOATS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, form.VALUE_RANK], ROW_TYPE)
    weights = gl.allocate_shared_memory(ROW_TYPE, [QUERIES, 64], WEIGHTS)
    floats = weights
    if form.VALUE_BITS < 16:
        floats = gl.allocate_shared_memory(ROW_TYPE, [64, form.VALUE_RANK], FLOATS)
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(0, SCORES))
    # Sums over tokens stay with the threads that have the tokens, to be added up at the end.
    total = gl.zeros([64, QUERIES], gl.float32, SCORES)
    zero = gl.zeros([64, QUERIES], gl.float32, SCORES)
    mixed = gl.zeros([form.VALUE_RANK, QUERIES], gl.float32, SCORES)
    for tile in range(LANE, (count + 63) // 64, LANES):
        # fmt: off
        top, total, zero, mixed = attend_tile(
            HEAD, tile, count - tile * 64, hidden - tile * 64, tiles, operands, weights, floats, form, work, mask,
            scale, norm_epsilon, top, total, zero, mixed, SCORES)
        # fmt: on

    sums = gl.sum(total, axis=0)
    inverse = 1.0 / gl.maximum(sums, 1.0e-30)
    mixed = (mixed + gl.sum(zero, axis=0)[None, :]) * inverse[None, :]
    member = gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES))
    row = (HEAD * work.GROUP + member) * row_splits + LANE
    column = gl.arange(0, form.VALUE_RANK, gl.SliceLayout(1, SCORES))
    column, there = true_column(column, value_width, form.VALUE_RANK, form.VALUE_BITS)
    inside = (member < work.GROUP)[None, :] & there[:, None]
    gl.store(partial + row[None, :] * value_width + column[:, None], mixed, mask=inside)
    logarithm = gl.where(sums > 0, top + gl.log2(gl.maximum(sums, 1.0e-30)), float("-inf"))
    gl.store(lse + row, logarithm, mask=member < work.GROUP)


@gluon.jit
def prepare(
    HEAD: gl.constexpr,
    LANE: gl.constexpr,
    LANES: gl.constexpr,
    operands,
    form,
    work,
    query,
    key_up,
    key_bias,
    norm_weight,
    bias_offset,
    key_width,
    query_head_stride,
    up_channel_stride,
):
    """Bring every LANES-th part of the channels of U, queries and what else there is of a head to shared memory."""
    CHUNK: gl.constexpr = work.CHUNK
    PARTS: gl.constexpr = form.HEAD_DIM // CHUNK
    RANK: gl.constexpr = form.KEY_RANK
    UP: gl.constexpr = gl.BlockedLayout([1, 2], [256 // RANK, RANK // 8], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 2], [64 // CHUNK, CHUNK // 2], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.arange(0, RANK, gl.SliceLayout(0, UP))
    if form.KEY_BITS < 16:
        column = stored_column(column, RANK, form.KEY_BITS)
    column, there = true_column(column, key_width, RANK, form.KEY_BITS)
    member = gl.arange(0, work.QUERIES, gl.SliceLayout(1, QUERY))
    for part in gl.static_range(LANE, PARTS, LANES):
        channel = part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, UP))
        rows = key_up + channel[:, None] * up_channel_stride + column[None, :]
        operands.up.index(HEAD * PARTS + part).store(gl.load(rows, mask=there[None, :], other=0.0))
        channel = part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, QUERY))
        rows = query + member[:, None] * query_head_stride + channel[None, :]
        queries = gl.load(rows, mask=(member < work.GROUP)[:, None], other=0.0)
        if work.NORM == 2:
            factors = gl.load(norm_weight + channel).to(gl.float32)[None, :]
            queries = (queries.to(gl.float32) * factors).to(queries.dtype)
        operands.query.index(HEAD * PARTS + part).store(queries)
        channel = part * CHUNK + gl.arange(0, CHUNK, LINE)
        if work.BIAS:
            operands.bias.index(HEAD * PARTS + part).store(gl.load(key_bias + bias_offset + channel).to(gl.float32))
        if work.NORM == 1 and HEAD == 0:
            operands.norm.index(part).store(gl.load(norm_weight + channel).to(gl.float32))


@gluon.jit
def attend_tile(
    HEAD: gl.constexpr,
    tile,
    seen,
    hidden,
    tiles,
    operands,
    weights,
    floats,
    form,
    work,
    mask,
    scale,
    norm_epsilon,
    top,
    total,
    zero,
    mixed,
    SCORES: gl.constexpr,
):
    """64 tokens, of which those from `hidden` up to `seen` count."""
    CHUNK: gl.constexpr = work.CHUNK
    HALF_PARTS: gl.constexpr = form.HEAD_DIM // CHUNK // 2
    HEAD_PARTS: gl.constexpr = HEAD * 2 * HALF_PARTS
    EXPANDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    ROTATED: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW_TYPE: gl.constexpr = tiles.rows.dtype
    # Scales alone are left to the scores, but where keys are added to or squared.
    SCALED: gl.constexpr = form.KEY_SCALES == 2 or (form.KEY_SCALES == 1 and (work.BIAS or work.NORM > 0))
    token = gl.arange(0, 64, TOKENS)
    inside = (token < seen) & (token >= hidden)
    if mask is not None:
        inside &= gl.load(mask + tile * 64 + token, mask=inside, other=0) != 0
    item = tile * work.HEADS + HEAD
    stage = item % tiles.STAGES
    mbarrier.wait(tiles.full(stage), (item // tiles.STAGES) & 1)
    latent = load_latents(tiles, stage, form, SCALED, gl.DotOperandLayout(0, EXPANDED, 2))

    row_stage = tile % tiles.ROW_STAGES
    scores = gl.zeros([64, work.QUERIES], gl.float32, SCORES)
    rotated = scores  # none yet
    other = scores
    square = gl.zeros([64], gl.float32, gl.SliceLayout(1, EXPANDED))
    for part in gl.static_range(HALF_PARTS):
        first = gl.zeros([64, CHUNK], gl.float32, EXPANDED)
        second = gl.zeros([64, CHUNK], gl.float32, EXPANDED)
        first_up = operands.up.index(HEAD_PARTS + part).permute([1, 0])
        second_up = operands.up.index(HEAD_PARTS + HALF_PARTS + part).permute([1, 0])
        first = warpgroup_mma(latent, first_up, first, use_acc=False, is_async=True)
        second = warpgroup_mma(latent, second_up, second, use_acc=False, is_async=True)
        # What the tensor cores read from registers must live until they have; keys of 16 bits they read from the tile.
        if part == 0 and form.KEY_BITS == 16:
            first, second = warpgroup_mma_wait(0, deps=[first, second])
        elif part == 0:
            first, second, latent = warpgroup_mma_wait(0, deps=[first, second, latent])
        elif form.KEY_BITS == 16:
            first, second, scores, rotated, other = warpgroup_mma_wait(0, deps=[first, second, scores, rotated, other])
        else:
            first, second, latent, scores, rotated, other = warpgroup_mma_wait(
                0, deps=[first, second, latent, scores, rotated, other]
            )
        if part == 0:
            mbarrier.wait(tiles.rows_full(row_stage), (tile // tiles.ROW_STAGES) & 1)
        cos = tiles.cos(row_stage).slice(part * CHUNK, CHUNK, dim=1).load(EXPANDED)
        sin = tiles.sin(row_stage).slice(part * CHUNK, CHUNK, dim=1).load(EXPANDED)
        if part == HALF_PARTS - 1:
            release(tiles.rows_free(row_stage))
        if work.BIAS:
            first += line(operands.bias.index(HEAD_PARTS + part), EXPANDED)
            second += line(operands.bias.index(HEAD_PARTS + HALF_PARTS + part), EXPANDED)
        if work.NORM == 1:
            square += gl.sum(first * first + second * second, axis=1)
            first *= line(operands.norm.index(part), EXPANDED)
            second *= line(operands.norm.index(HALF_PARTS + part), EXPANDED)
        cos = widened(cos)
        sin = widened(sin)
        rotated = first * cos - second * sin
        other = second * cos + first * sin
        if work.NORM == 2:  # rotations of some models stretch as well
            square += gl.sum(rotated * rotated + other * other, axis=1)
        rotated = gl.convert_layout(rotated.to(ROW_TYPE), ROTATED)
        other = gl.convert_layout(other.to(ROW_TYPE), ROTATED)
        first_query = operands.query.index(HEAD_PARTS + part).permute([1, 0])
        second_query = operands.query.index(HEAD_PARTS + HALF_PARTS + part).permute([1, 0])
        scores = warpgroup_mma(rotated, first_query, scores, use_acc=part > 0, is_async=True)
        scores = warpgroup_mma(other, second_query, scores, is_async=True)

    value_scale, value_zero = decode_values(tiles, stage, floats, form, inside, seen, hidden)
    scores, rotated, other = warpgroup_mma_wait(0, deps=[scores, rotated, other])
    scores *= scale
    if form.KEY_SCALES == 1 and not SCALED:
        key_scale, _ = scales_and_zeros(tiles.key_scales.index(stage), form.KEY_SCALES, TOKENS)
        scores *= key_scale[:, None]
    if work.NORM > 0:
        inverse = gl.rsqrt(square * (1.0 / form.HEAD_DIM) + norm_epsilon)
        scores *= gl.convert_layout(inverse, TOKENS)[:, None]
    scores = gl.where(inside[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=0))
    decay = gl.exp2(top - new_top)[None, :]
    likely = gl.exp2(scores - new_top[None, :])
    total = total * decay + likely
    if form.VALUE_SCALES == 2:
        zero = zero * decay + likely * value_zero[:, None]
    if form.VALUE_BITS < 16:
        likely *= value_scale[:, None]
    weights.store(likely.to(ROW_TYPE).permute([1, 0]))
    fence_async_shared()
    group_barrier()
    mixed = mixed * decay
    weights = weights.permute([1, 0])
    if form.VALUE_BITS == 16:
        mixed = warpgroup_mma(tiles.value.index(stage).permute([1, 0]), weights, mixed, is_async=True)
    else:
        mixed = warpgroup_mma(floats.permute([1, 0]), weights, mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, deps=[mixed])
    release(tiles.free(stage))
    return new_top, total, zero, mixed


@gluon.jit
def load_latents(tiles, stage, form, SCALED: gl.constexpr, LATENT: gl.constexpr):
    """Keys of a tile as the left operand of a product: whole numbers, times their scale where SCALED."""
    RANK: gl.constexpr = form.KEY_RANK
    if form.KEY_BITS == 16:
        return tiles.key.index(stage)
    else:
        KEYS: gl.constexpr = key_layout(RANK // 2 if form.KEY_BITS == 4 else RANK)
        OFFSET: gl.constexpr = raised_offset(form.KEY_BITS, form.KEY_SCALES)
        codes = tiles.key.index(stage).load(KEYS)
        if form.KEY_BITS == 4:
            low, high = raised_nibbles(codes)
        else:
            low = raised_bytes(codes, form.KEY_SCALES)
            high = low
        if SCALED:
            factor, shift = scales_and_zeros(tiles.key_scales.index(stage), form.KEY_SCALES, gl.SliceLayout(1, KEYS))
            if form.KEY_SCALES == 2:
                shift = shift - OFFSET * factor
            else:
                shift = -OFFSET * factor
            low = low * factor[:, None] + shift[:, None]
            high = high * factor[:, None] + shift[:, None]
        else:  # levels are whole numbers that 16-bit floats hold
            low = low - OFFSET
            high = high - OFFSET
        return gl.convert_layout(in_product_order(low, high, 64, RANK, form.KEY_BITS).to(tiles.rows.dtype), LATENT)


@gluon.jit
def decode_values(tiles, stage, floats, form, inside, seen, hidden):
    """Make a tile's values a left operand in shared memory, without what may be NaN; their scales and zeros, or 0."""
    RANK: gl.constexpr = form.VALUE_RANK
    WIDTH: gl.constexpr = RANK // 2 if form.VALUE_BITS == 4 else RANK
    VALUES: gl.constexpr = gl.BlockedLayout([WIDTH // 16, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile = tiles.value.index(stage)
    value_scale = inside.to(gl.float32)
    value_zero = value_scale
    if form.VALUE_BITS == 16:
        # The product reads the tile as it is: what no weight of 0 would silence is taken out of it.
        if (seen < 64) | (hidden > 0):
            token = gl.arange(0, 64, gl.SliceLayout(1, VALUES))
            readable = (token < seen) & (token >= hidden)
            tile.store(gl.where(readable[:, None], tile.load(VALUES), 0.0))
    else:
        OFFSET: gl.constexpr = raised_offset(form.VALUE_BITS, form.VALUE_SCALES)
        codes = tile.load(VALUES)
        if form.VALUE_BITS == 4:
            low, high = raised_nibbles(codes)
            floats.slice(0, RANK // 2, dim=1).store((low - OFFSET).to(floats.dtype))
            floats.slice(RANK // 2, RANK // 2, dim=1).store((high - OFFSET).to(floats.dtype))
        else:
            floats.store((raised_bytes(codes, form.VALUE_SCALES) - OFFSET).to(floats.dtype))
        TOKENS: gl.constexpr = inside.type.layout
        value_scale, value_zero = scales_and_zeros(tiles.value_scales.index(stage), form.VALUE_SCALES, TOKENS)
        value_scale = gl.where(inside, value_scale, 0.0)
        value_zero = gl.where(inside, value_zero, 0.0)
    return value_scale, value_zero


@gluon.jit
def line(numbers, LAYOUT: gl.constexpr):
    """`[CHUNK]` in shared memory as a row beside a product."""
    return numbers.load(gl.SliceLayout(0, LAYOUT))[None, :]
