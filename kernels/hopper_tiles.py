"""The warp of the Hopper kernels (Gluon) that brings tiles of tokens into shared memory by bulk copies."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


# Arguments that change as a cache grows: no reason to compile again.
CHANGING = [
    *("slots", "first", "split_tokens", "splits", "key_batch_rows", "key_head_rows", "value_batch_rows"),
    *("value_head_rows", "rows_batch_rows"),
]
# Later versions of Triton have other names for them.
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def load_tiles(
    key,
    value,
    key_scales,
    value_scales,
    cos,
    sin,
    key_tiles,
    value_tiles,
    key_scale_tiles,
    value_scale_tiles,
    cos_tiles,
    sin_tiles,
    full,
    free,
    rows_full,
    rows_free,
    key_row,
    value_row,
    row,
    key_head_rows,
    value_head_rows,
    tiles,
    SCALES: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_STAGES: gl.constexpr,
):
    """For every tile of tokens: its rotary rows once, then keys and values of each head with their scales.

    Args:
        key ... sin: descriptors.
        *_tiles: shared memory of as many stages, `[stages, tokens, ...]`.
        full, free: barriers of the stages of keys and values; rows_full, rows_free: of rotary rows.
        key_row, value_row, row: first rows in the descriptors.
        key_head_rows, value_head_rows: rows from a head to the next.
        tiles: number of tiles.
    """
    TILE: gl.constexpr = cos.block_type.shape[0]
    ROW_BYTES: gl.constexpr = 2 * cos.block_type.nbytes
    TOKEN_BYTES: gl.constexpr = key.block_type.nbytes + value.block_type.nbytes
    BYTES: gl.constexpr = TOKEN_BYTES + (2 * key_scales.block_type.nbytes if SCALES > 0 else 0)
    item = 0
    for tile in range(tiles):
        row_stage = tile % ROW_STAGES
        ready = rows_full.index(row_stage)
        mbarrier.wait(rows_free.index(row_stage), ((tile // ROW_STAGES) & 1) ^ 1)
        mbarrier.expect(ready, ROW_BYTES)
        copy_tile(cos, [row + tile * TILE, 0], ready, cos_tiles.index(row_stage))
        copy_tile(sin, [row + tile * TILE, 0], ready, sin_tiles.index(row_stage))
        for head in gl.static_range(HEADS):
            stage = item % STAGES
            ready = full.index(stage)
            mbarrier.wait(free.index(stage), ((item // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, BYTES)
            key_first = key_row + head * key_head_rows + tile * TILE
            value_first = value_row + head * value_head_rows + tile * TILE
            copy_tile(key, [key_first, 0], ready, key_tiles.index(stage))
            copy_tile(value, [value_first, 0], ready, value_tiles.index(stage))
            if SCALES > 0:
                copy_tile(key_scales, [key_first], ready, key_scale_tiles.index(stage))
                copy_tile(value_scales, [value_first], ready, value_scale_tiles.index(stage))
            item += 1


@gluon.jit
def release(barrier):
    """Give a stage back after it was read to registers.

    The next bulk copy is not ordered after reads that have only been issued: without the fence it was seen to
    overwrite what was still to be read, where a stage is refilled at once.
    """
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)
