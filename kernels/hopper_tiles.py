"""What the Hopper kernels (Gluon) share: their form, tiles in shared memory, and the warp that fills these."""

# No postponed annotations: aggregates of Triton 3.6 read theirs as types.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate


# Later versions of Triton have other names for them.
aggregate = getattr(gluon, "aggregate", _aggregate)
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Arguments that change as a cache grows, or from layer to layer: no reason to compile again.
CHANGING = [
    *("slots", "first", "split_tokens", "splits", "key_width", "value_width", "key_batch_rows", "key_head_rows"),
    *("value_batch_rows", "value_head_rows", "rows_batch_rows", "mask_batch_stride"),
]


@aggregate
class Form:
    """What a kernel is compiled for, see `hopper_launch.form_constants`.

    Attributes:
        HEAD_DIM: channels of a head.
        KEY_RANK, VALUE_RANK: powers of two that hold the numbers stored of a head. What is behind the true widths is 0
            as levels or as weights.
        KEY_BITS, VALUE_BITS: of a number.
        KEY_SCALES, VALUE_SCALES: numbers of a token's scale: 0, 1, or 2 with a zero.
    """

    HEAD_DIM: gl.constexpr
    KEY_RANK: gl.constexpr
    VALUE_RANK: gl.constexpr
    KEY_BITS: gl.constexpr
    VALUE_BITS: gl.constexpr
    KEY_SCALES: gl.constexpr
    VALUE_SCALES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEAD_DIM, KEY_RANK, VALUE_RANK, KEY_BITS, VALUE_BITS, KEY_SCALES, VALUE_SCALES):
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.KEY_RANK = gl.constexpr(KEY_RANK)
        self.VALUE_RANK = gl.constexpr(VALUE_RANK)
        self.KEY_BITS = gl.constexpr(KEY_BITS)
        self.VALUE_BITS = gl.constexpr(VALUE_BITS)
        self.KEY_SCALES = gl.constexpr(KEY_SCALES)
        self.VALUE_SCALES = gl.constexpr(VALUE_SCALES)


@aggregate
class Tiles:
    """Stages of shared memory, each with a barrier that says it is full and one that says it is free.

    Few allocations: each takes a register of every thread that is handed it.

    Attributes:
        key, value: `[STAGES, tokens, bytes or width]`.
        key_scales, value_scales: `[STAGES, tokens]`.
        rows: `[2 ROW_STAGES, tokens, HEAD_DIM / 2]`, cosines and sines in turn.
        barriers: of the stages of the first four, full and then free; of the stages of rows, full and then free.
    """

    key: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor
    key_scales: gl.shared_memory_descriptor
    value_scales: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    ROW_STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, key, value, key_scales, value_scales, rows, barriers, STAGES, ROW_STAGES):
        self.key = key
        self.value = value
        self.key_scales = key_scales
        self.value_scales = value_scales
        self.rows = rows
        self.barriers = barriers
        self.STAGES = gl.constexpr(STAGES)
        self.ROW_STAGES = gl.constexpr(ROW_STAGES)

    @gluon.jit
    def full(self, stage):
        return self.barriers.index(stage)

    @gluon.jit
    def free(self, stage):
        return self.barriers.index(self.STAGES + stage)

    @gluon.jit
    def rows_full(self, stage):
        return self.barriers.index(2 * self.STAGES + stage)

    @gluon.jit
    def rows_free(self, stage):
        return self.barriers.index(2 * self.STAGES + self.ROW_STAGES + stage)

    @gluon.jit
    def cos(self, stage):
        return self.rows.index(2 * stage)

    @gluon.jit
    def sin(self, stage):
        return self.rows.index(2 * stage + 1)


@gluon.jit
def allocate_tiles(
    key,
    value,
    key_scales,
    value_scales,
    cos,
    READERS: gl.constexpr,
    ROW_READERS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """Shared memory for blocks of these descriptors, that of sines as that of cosines.

    Args:
        READERS, ROW_READERS: groups of warps that give back each stage of keys and values, and of rows.
    """
    TILE: gl.constexpr = cos.block_type.shape[0]
    HALF: gl.constexpr = cos.block_type.shape[1]
    ALL_STAGES: gl.constexpr = STAGES + ROW_STAGES
    barriers = gl.allocate_shared_memory(gl.int64, [2 * ALL_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
        mbarrier.init(barriers.index(STAGES + stage), count=READERS)
    for stage in gl.static_range(ROW_STAGES):
        mbarrier.init(barriers.index(2 * STAGES + stage), count=1)
        mbarrier.init(barriers.index(2 * STAGES + ROW_STAGES + stage), count=ROW_READERS)
    return Tiles(
        gl.allocate_shared_memory(key.dtype, [STAGES, TILE, key.block_type.shape[1]], key.layout),
        gl.allocate_shared_memory(value.dtype, [STAGES, TILE, value.block_type.shape[1]], value.layout),
        gl.allocate_shared_memory(key_scales.dtype, [STAGES, TILE], key_scales.layout),
        gl.allocate_shared_memory(value_scales.dtype, [STAGES, TILE], value_scales.layout),
        gl.allocate_shared_memory(cos.dtype, [2 * ROW_STAGES, TILE, HALF], cos.layout),
        barriers,
        STAGES,
        ROW_STAGES,
    )


@gluon.jit
def seen_slots(lengths, starts, batch, slots, first, start, split_tokens, TILE: gl.constexpr):
    """Slots of the split from `start` on that a sequence has in use.

    Returns:
        The first of them that is in a tile with a slot to be seen; how many there are from there on; how many of
        these, at the front, are before the sequence's start.
    """
    end = slots
    if lengths is not None:
        end = gl.minimum(slots, gl.load(lengths + batch) - first)
    count = gl.maximum(gl.minimum(split_tokens, end - start), 0)
    hidden = start * 0
    if starts is not None:
        hidden = gl.maximum(gl.load(starts + batch) - first - start, 0)
        skipped = gl.minimum(hidden // TILE * TILE, count)
        start += skipped
        count -= skipped
        hidden -= skipped
    return start, count, hidden


@gluon.jit
def load_tiles(
    key,
    value,
    key_scales,
    value_scales,
    cos,
    sin,
    tiles,
    key_row,
    value_row,
    row,
    key_head_rows,
    value_head_rows,
    count,
    form,
    HEADS: gl.constexpr,
):
    """For every tile of tokens: its rotary rows once, then keys and values of each head with their scales.

    Args:
        key ... sin: descriptors.
        tiles: `Tiles`.
        key_row, value_row, row: first rows in the descriptors.
        key_head_rows, value_head_rows: rows from a head to the next.
        count: tokens.
    """
    TILE: gl.constexpr = cos.block_type.shape[0]
    ROW_BYTES: gl.constexpr = 2 * cos.block_type.nbytes
    KEY_SCALE_BYTES: gl.constexpr = key_scales.block_type.nbytes if form.KEY_SCALES > 0 else 0
    VALUE_SCALE_BYTES: gl.constexpr = value_scales.block_type.nbytes if form.VALUE_SCALES > 0 else 0
    TOKEN_BYTES: gl.constexpr = key.block_type.nbytes + value.block_type.nbytes
    BYTES: gl.constexpr = TOKEN_BYTES + KEY_SCALE_BYTES + VALUE_SCALE_BYTES
    item = 0
    for tile in range((count + TILE - 1) // TILE):
        row_stage = tile % tiles.ROW_STAGES
        ready = tiles.rows_full(row_stage)
        mbarrier.wait(tiles.rows_free(row_stage), ((tile // tiles.ROW_STAGES) & 1) ^ 1)
        mbarrier.expect(ready, ROW_BYTES)
        copy_tile(cos, [row + tile * TILE, 0], ready, tiles.cos(row_stage))
        copy_tile(sin, [row + tile * TILE, 0], ready, tiles.sin(row_stage))
        for head in gl.static_range(HEADS):
            stage = item % tiles.STAGES
            ready = tiles.full(stage)
            mbarrier.wait(tiles.free(stage), ((item // tiles.STAGES) & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            key_first = key_row + head * key_head_rows + tile * TILE
            value_first = value_row + head * value_head_rows + tile * TILE
            copy_tile(key, [key_first, 0], ready, tiles.key.index(stage))
            copy_tile(value, [value_first, 0], ready, tiles.value.index(stage))
            if form.KEY_SCALES > 0:
                copy_tile(key_scales, [key_first], ready, tiles.key_scales.index(stage))
            if form.VALUE_SCALES > 0:
                copy_tile(value_scales, [value_first], ready, tiles.value_scales.index(stage))
            item += 1


@gluon.jit
def release(barrier):
    """Give a stage back after it was read to registers.

    The next bulk copy is not ordered after reads that have only been issued: without the fence it was seen to
    overwrite what was still to be read, where a stage is refilled at once.
    """
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)
