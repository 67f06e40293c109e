"""Decode attention in the position-query form, for Hopper (Gluon).

With rows `T[j] = [cos, sin]` of token j, shared by all heads, and once a step and head

    W = [q0 U0 + q1 U1 ; q1 U0 - q0 U1]    (head_dim x rank)

the score of a token with latent c is `c . (T W)`: the key is never expanded, and the left operand of the product is T,
not the cache, so that codes need no conversion before tensor cores. One warp brings tiles into shared memory; two
groups of four warps work on one half of every tile each. See docs/kernels.md for what was measured.
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
    add_weighted,
    in_stored_order,
    key_layout,
    raised_bytes,
    raised_nibbles,
    raised_offset,
    scales_and_zeros,
    stored_column,
    true_column,
    widened,
)
from .hopper_tiles import CHANGING, Form, aggregate, allocate_tiles, load_tiles, release, seen_slots


@aggregate
class Sums:
    """What a group of warps has of a head, for each group of tokens that a thread mixes.

    Attributes:
        top, total, zero: `[groups]`: largest score, sum of weights, sum of weighted zeros.
        mixed, high: `[groups, bytes or width]`: weighted sum of values; for 4 bits of low and of high nibbles.
    """

    top: gl.tensor
    total: gl.tensor
    zero: gl.tensor
    mixed: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(self, top, total, zero, mixed, high):
        self.top = top
        self.total = total
        self.zero = zero
        self.mixed = mixed
        self.high = high


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
    mask,
    heads,
    lengths,
    starts,
    partial,
    lse,
    scale,
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
):
    """One split of HEADS heads of a sequence. Grid `(splits, heads of the part / HEADS, B)`, 4 warps.

    Args:
        key, value: descriptors of `[rows, bytes or width]`, tiles of 128 tokens.
        key_scales, value_scales: descriptors of all scales in a row, 128 tokens a tile: fp16 for SCALES = 1, scale and
            zero as one uint32 for 2. Anything for 0.
        cos, sin: descriptors of `[rows, HEAD_DIM / 2]`, tiles of 128 tokens.
        query: `[B, Hq, 1, HEAD_DIM]`.
        key_up: `[heads of the part, HEAD_DIM, key_width]`.
        mask: uint8 `[B or 1, places]`, 0 for what is not to be seen, or None.
        heads: int32, the layer's heads that the part has, or None.
        lengths, starts: int32 `[B]`, places in use and the first to be seen, or None.
        partial, lse: `[B, heads of the part, 1, 2 splits, value_width]` and the same without the last.
        scale: of the scores, times log2(e).
        slots, first: tokens of the part, and the place of the first.
        key_width, value_width: numbers stored of a head.
        *_rows: strides in rows of the descriptors.
        HEAD_DIM ... VALUE_SCALES: see `hopper_tiles.Form`.
    """
    split = gl.program_id(0)
    head = gl.program_id(1) * HEADS
    batch = gl.program_id(2)
    TILE: gl.constexpr = cos.block_type.shape[0]
    HALF: gl.constexpr = HEAD_DIM // 2
    ROW_TYPE: gl.constexpr = cos.dtype
    HIDING: gl.constexpr = mask is not None or starts is not None
    form = Form(HEAD_DIM, KEY_RANK, VALUE_RANK, KEY_BITS, VALUE_BITS, KEY_SCALES, VALUE_SCALES)
    start, count, hidden = seen_slots(lengths, starts, batch, slots, first, split * split_tokens, split_tokens, TILE)
    tiles = allocate_tiles(key, value, key_scales, value_scales, cos, 2, 2, STAGES, ROW_STAGES)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, KEY_RANK], ROW_TYPE)
    cos_weights = gl.allocate_shared_memory(ROW_TYPE, [HEADS, HALF, KEY_RANK], WEIGHTS)
    sin_weights = gl.allocate_shared_memory(ROW_TYPE, [HEADS, HALF, KEY_RANK], WEIGHTS)
    folded = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(folded.index(0), count=2)

    query += batch.to(gl.int64) * query_batch_stride
    key_up += head.to(gl.int64) * up_head_stride
    key_row = batch * key_batch_rows + head * key_head_rows + start
    value_row = batch * value_batch_rows + head * value_head_rows + start
    row = batch * rows_batch_rows + first + start
    if mask is not None:
        mask += batch.to(gl.int64) * mask_batch_stride + first + start
    out = ((batch.to(gl.int64) * gl.num_programs(1) * HEADS + head) * splits + split) * 2
    partial += out * value_width
    lse += out
    # The arguments stand in the call: constants that go through a variable become tensors.
    # fmt: off
    gl.warp_specialize([
        (attend, (0, tiles, cos_weights, sin_weights, folded, form, query, key_up, mask, heads, head, scale, count,
                  hidden, partial, lse, splits, key_width, value_width, query_head_stride, up_head_stride,
                  up_channel_stride, HEADS, HIDING)),
        (attend, (1, tiles, cos_weights, sin_weights, folded, form, query, key_up, mask, heads, head, scale, count,
                  hidden, partial, lse, splits, key_width, value_width, query_head_stride, up_head_stride,
                  up_channel_stride, HEADS, HIDING)),
        (load_tiles, (key, value, key_scales, value_scales, cos, sin, tiles, key_row, value_row, row, key_head_rows,
                      value_head_rows, count, form, HEADS)),
    ], [4, 1], [216, 24])
    # fmt: on


@gluon.jit
def attend(
    WHICH: gl.constexpr,
    tiles,
    cos_weights,
    sin_weights,
    folded,
    form,
    query,
    key_up,
    mask,
    heads,
    head,
    scale,
    count,
    hidden,
    partial,
    lse,
    splits,
    key_width,
    value_width,
    query_head_stride,
    up_head_stride,
    up_channel_stride,
    HEADS: gl.constexpr,
    HIDING: gl.constexpr,
):
    """Four warps: half WHICH of every tile, 64 tokens, for all heads of the program."""
    for number in gl.static_range(HEADS):
        if number % 2 == WHICH:
            layer_head = head + number
            if heads is not None:
                layer_head = gl.load(heads + head + number)
            # fmt: off
            fold_query(
                query + layer_head.to(gl.int64) * query_head_stride, key_up + number * up_head_stride,
                up_channel_stride, key_width, scale, cos_weights.index(number), sin_weights.index(number), form)
            # fmt: on
    fence_async_shared()
    mbarrier.arrive(folded.index(0), count=1)
    mbarrier.wait(folded.index(0), 0)

    WIDTH: gl.constexpr = form.VALUE_RANK // 2 if form.VALUE_BITS == 4 else form.VALUE_RANK  # of a value tile
    ROWS: gl.constexpr = WIDTH // 16  # tokens that a thread mixes
    VALUES: gl.constexpr = gl.BlockedLayout([ROWS, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    lowest = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, VALUES)).reshape([64 // ROWS, ROWS])
    zeros = gl.full([64, WIDTH], 0.0, gl.float32, VALUES).reshape([64 // ROWS, ROWS, WIDTH])
    # A maximum and sums for each group of tokens that a thread mixes: nothing is reduced over threads before the end.
    top = gl.max(lowest, axis=1)
    mixed = gl.sum(zeros, axis=1)
    sums0 = Sums(top, top * 0.0, top * 0.0, mixed, mixed)
    sums1 = Sums(top, top * 0.0, top * 0.0, mixed, mixed)
    whole = 0
    if not HIDING:
        whole = count // 128
        for tile in range(whole):
            # fmt: off
            sums0, sums1 = attend_tile(WHICH, tile, 64, 0, tiles, cos_weights, sin_weights, form, mask, sums0, sums1,
                                       HEADS, VALUES, False)
            # fmt: on
    for tile in range(whole, (count + 127) // 128):
        seen = count - tile * 128 - 64 * WHICH
        before = hidden - tile * 128 - 64 * WHICH
        # fmt: off
        sums0, sums1 = attend_tile(WHICH, tile, seen, before, tiles, cos_weights, sin_weights, form, mask, sums0,
                                   sums1, HEADS, VALUES, True)
        # fmt: on
    store_partial(sums0, partial + WHICH * value_width, lse + WHICH, value_width, form)
    if HEADS == 2:
        row = splits * 2 + WHICH
        store_partial(sums1, partial + row * value_width, lse + row, value_width, form)


@gluon.jit
def fold_query(query, key_up, up_channel_stride, width, scale, cos_weights, sin_weights, form):
    """Write W of one head, columns in the order of `stored_column`."""
    HALF: gl.constexpr = form.HEAD_DIM // 2
    RANK: gl.constexpr = form.KEY_RANK
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [256 // RANK, RANK // 8], [4, 1], [1, 0])
    channel = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = stored_column(gl.arange(0, RANK, gl.SliceLayout(0, LAYOUT)), RANK, form.KEY_BITS)
    column, there = true_column(column, width, RANK, form.KEY_BITS)
    query0 = gl.load(query + channel).to(gl.float32)[:, None] * scale
    query1 = gl.load(query + HALF + channel).to(gl.float32)[:, None] * scale
    up = key_up + channel[:, None] * up_channel_stride + column[None, :]
    up0 = gl.load(up, mask=there[None, :], other=0.0).to(gl.float32)
    up1 = gl.load(up + HALF * up_channel_stride, mask=there[None, :], other=0.0).to(gl.float32)
    cos_weights.store((query0 * up0 + query1 * up1).to(cos_weights.dtype))
    sin_weights.store((query1 * up0 - query0 * up1).to(sin_weights.dtype))


@gluon.jit
def attend_tile(
    WHICH: gl.constexpr,
    tile,
    seen,
    before,
    tiles,
    cos_weights,
    sin_weights,
    form,
    mask,
    sums0,
    sums1,
    HEADS: gl.constexpr,
    VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Half a tile for all heads; of its tokens those from `before` up to `seen` count where MASKED."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.KEY_RANK, 16])
    ROW_OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    token = gl.arange(0, 64, gl.SliceLayout(1, VALUES))
    readable = (token < seen) & (token >= before)
    inside = readable
    if mask is not None:
        inside &= gl.load(mask + tile * 128 + 64 * WHICH + token, mask=readable, other=0) != 0
    row_stage = tile % tiles.ROW_STAGES
    mbarrier.wait(tiles.rows_full(row_stage), (tile // tiles.ROW_STAGES) & 1)
    cos = tiles.cos(row_stage).slice(64 * WHICH, 64).load(ROW_OPERAND)
    sin = tiles.sin(row_stage).slice(64 * WHICH, 64).load(ROW_OPERAND)
    release(tiles.rows_free(row_stage))
    # fmt: off
    sums0, cos, sin = attend_head(WHICH, tile * HEADS, readable, inside, cos, sin, cos_weights.index(0),
                                  sin_weights.index(0), tiles, sums0, form, PRODUCT, VALUES, MASKED)
    if HEADS == 2:
        sums1, cos, sin = attend_head(WHICH, tile * HEADS + 1, readable, inside, cos, sin, cos_weights.index(1),
                                      sin_weights.index(1), tiles, sums1, form, PRODUCT, VALUES, MASKED)
    # fmt: on
    return sums0, sums1


@gluon.jit
def attend_head(
    WHICH: gl.constexpr,
    item,
    readable,
    inside,
    cos,
    sin,
    cos_weights,
    sin_weights,
    tiles,
    sums,
    form,
    PRODUCT: gl.constexpr,
    VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """64 tokens of one head.

    Args:
        item: number of the tile of keys and values.
        readable, inside: of tokens, whether memory holds one of the sequence and whether it is to be seen.
        cos, sin: `[64, HEAD_DIM / 2]`, the left operand in registers.
        sums: `Sums` so far.

    Returns:
        The sums with the tokens added, and cos and sin: what the tensor cores read must live until they have.
    """
    RANK: gl.constexpr = form.KEY_RANK
    BITS: gl.constexpr = form.KEY_BITS
    KEYS: gl.constexpr = key_layout(RANK // 2 if BITS == 4 else RANK)
    OFFSET: gl.constexpr = raised_offset(form.VALUE_BITS, form.VALUE_SCALES)
    TOKENS: gl.constexpr = gl.SliceLayout(1, VALUES)
    ROWS: gl.constexpr = VALUES.size_per_thread[0]
    GROUPS: gl.constexpr = 64 // ROWS
    GROUP: gl.constexpr = gl.SliceLayout(1, sums.mixed.type.layout)

    product = gl.zeros([64, RANK], gl.float32, PRODUCT)
    product = warpgroup_mma(cos, cos_weights, product, use_acc=False, is_async=True)
    product = warpgroup_mma(sin, sin_weights, product, is_async=True)
    stage = item % tiles.STAGES
    mbarrier.wait(tiles.full(stage), (item // tiles.STAGES) & 1)
    key = tiles.key.index(stage).slice(64 * WHICH, 64).load(KEYS)
    value = tiles.value.index(stage).slice(64 * WHICH, 64).load(VALUES)
    if form.KEY_SCALES > 0:
        key_scale, key_zero = scales_and_zeros(
            tiles.key_scales.index(stage).slice(64 * WHICH, 64), form.KEY_SCALES, gl.SliceLayout(1, KEYS)
        )
    else:
        key_scale, key_zero = 1.0, 0.0
    if form.VALUE_SCALES > 0:
        value_scale, value_zero = scales_and_zeros(
            tiles.value_scales.index(stage).slice(64 * WHICH, 64), form.VALUE_SCALES, TOKENS
        )
    release(tiles.free(stage))
    product, cos, sin = warpgroup_mma_wait(0, deps=[product, cos, sin])
    scores = gl.convert_layout(key_scores(product, key, key_scale, key_zero, form), TOKENS)
    if MASKED:
        scores = gl.where(inside, scores, float("-inf"))
        if form.VALUE_SCALES > 0:
            value_scale = gl.where(inside, value_scale, 0.0)
            value_zero = gl.where(inside, value_zero, 0.0)
        else:
            value = gl.where(readable[:, None], value, 0.0)

    scores = scores.reshape([GROUPS, ROWS])
    top = gl.maximum(sums.top, gl.convert_layout(gl.max(scores, axis=1), sums.top.type.layout))
    decay = gl.exp2(sums.top - top)
    weights = gl.exp2(scores - gl.convert_layout(top, gl.SliceLayout(1, scores.type.layout))[:, None])
    total = sums.total * decay + gl.convert_layout(gl.sum(weights, axis=1), sums.total.type.layout)
    zero = sums.zero
    mixed = sums.mixed * gl.convert_layout(decay, GROUP)[:, None]
    high = sums.high
    if form.VALUE_BITS == 4:
        high = high * gl.convert_layout(decay, GROUP)[:, None]
    if form.VALUE_SCALES == 2:
        value_zero = gl.convert_layout(value_zero.reshape([GROUPS, ROWS]), weights.type.layout)
        zero = zero * decay + gl.convert_layout(gl.sum(weights * value_zero, axis=1), zero.type.layout)
    if form.VALUE_SCALES > 0:
        weights *= gl.convert_layout(value_scale.reshape([GROUPS, ROWS]), weights.type.layout)
        shift = gl.convert_layout(gl.sum(weights, axis=1), GROUP)[:, None] * -OFFSET
        mixed += shift
        if form.VALUE_BITS == 4:
            high += shift
    if form.VALUE_BITS == 4:
        low_value, upper_value = raised_nibbles(value)
        mixed = add_weighted(mixed, weights, low_value, ROWS)
        high = add_weighted(high, weights, upper_value, ROWS)
    elif form.VALUE_BITS == 8:
        mixed = add_weighted(mixed, weights, raised_bytes(value, form.VALUE_SCALES), ROWS)
    else:
        mixed = add_weighted(mixed, weights, widened(value), ROWS)
    return Sums(top, total, zero, mixed, high), cos, sin


@gluon.jit
def key_scores(product, key, key_scale, key_zero, form):
    """`sum(product * level(key))` of each row, over codes in memory as they are in registers."""
    RANK: gl.constexpr = form.KEY_RANK
    BITS: gl.constexpr = form.KEY_BITS
    SCALES: gl.constexpr = form.KEY_SCALES
    WIDTH: gl.constexpr = key.shape[1]
    OFFSET: gl.constexpr = raised_offset(BITS, SCALES)
    low, upper = in_stored_order(product, 64, RANK, BITS)
    low = gl.convert_layout(low, key.type.layout)
    # Sums within a thread first: over the four threads of a row only once, with the scales in.
    if BITS == 16:
        scores = gl.sum(low * widened(key), axis=1)
    elif BITS == 8 and SCALES == 1:
        scores = gl.sum(low * (raised_bytes(key, SCALES) - OFFSET), axis=1)
        scores *= gl.convert_layout(key_scale, scores.type.layout)
    else:
        if BITS == 4:
            upper = gl.convert_layout(upper, key.type.layout)
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
    return scores


@gluon.jit
def store_partial(sums, partial, lse, width, form):
    """Merge the groups of tokens and write the result of a split, -inf where it saw nothing."""
    RANK: gl.constexpr = form.VALUE_RANK
    BITS: gl.constexpr = form.VALUE_BITS
    WIDTH: gl.constexpr = sums.mixed.shape[1]
    highest = gl.max(sums.top, axis=0)
    factor = gl.exp2(sums.top - highest)
    whole = gl.sum(sums.total * factor, axis=0)
    offset = gl.sum(sums.zero * factor, axis=0)
    inverse = 1.0 / gl.maximum(whole, 1.0e-30)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, sums.mixed.type.layout))[:, None]
    out = (gl.sum(sums.mixed * factor, axis=0) + offset) * inverse
    column = gl.arange(0, WIDTH, out.type.layout)
    place, there = true_column(column, width, RANK, BITS)
    gl.store(partial + place, out, mask=there)
    if BITS == 4:
        out = (gl.sum(sums.high * factor, axis=0) + offset) * inverse
        place, there = true_column(column + WIDTH, width, RANK, BITS)
        gl.store(partial + place, out, mask=there)
    gl.store(lse, gl.where(whole > 0, highest + gl.log2(gl.maximum(whole, 1.0e-30)), float("-inf")))
