"""Device functions of the Hopper kernels (Gluon) on codes and on tiles in registers.

Codes become fp32 numbers without a conversion: a byte is put into the fraction of a power of two, which gives the
code plus that power, `raised`. What the power adds is taken off in sums where that is cheaper.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def key_layout(width):
    """64 keys as a group of four warps holds them: a thread has a quarter of the `width` columns of two tokens."""
    columns = [[0, 1 << bit] for bit in range((width // 4).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*columns, [8, 0]],
        [[0, width // 4], [0, width // 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, width],
    )


@gluon.constexpr_function
def raised_offset(bits, scales):
    """What codes raised to floats are above their levels; nothing for 16 bits."""
    if bits == 16:
        return 0.0
    center = (8.0 if bits == 4 else 128.0) if scales == 1 else 0.0
    return (128.0 if bits == 4 else 32768.0) + center


@gluon.jit
def raised_nibbles(codes):
    """Low and high nibbles of bytes, as fp32 128 + code each."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        and.b32 low, $8, 0x0f0f0f0f;
        shr.u32 high, $8, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 $0, low, 0x43000000, 0x7044;
        prmt.b32 $1, low, 0x43000000, 0x7144;
        prmt.b32 $2, low, 0x43000000, 0x7244;
        prmt.b32 $3, low, 0x43000000, 0x7344;
        prmt.b32 $4, high, 0x43000000, 0x7044;
        prmt.b32 $5, high, 0x43000000, 0x7144;
        prmt.b32 $6, high, 0x43000000, 0x7244;
        prmt.b32 $7, high, 0x43000000, 0x7344;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [codes],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def raised_bytes(codes, SCALES: gl.constexpr):
    """Bytes as fp32 32768 + code; for SCALES = 1, whose bytes are two's complement, 32896 + level."""
    if SCALES == 1:
        codes = codes ^ 0x80
    return gl.inline_asm_elementwise(
        """
        prmt.b32 $0, $4, 0x47000000, 0x7404;
        prmt.b32 $1, $4, 0x47000000, 0x7414;
        prmt.b32 $2, $4, 0x47000000, 0x7424;
        prmt.b32 $3, $4, 0x47000000, 0x7434;
        """,
        "=r,=r,=r,=r,r",
        [codes],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def widened(numbers):
    """16-bit floats as fp32, with one operation each."""
    if numbers.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            shl.b32 $0, $2, 16;
            and.b32 $1, $2, 0xffff0000;
            """,
            "=r,=r,r",
            [numbers],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return numbers.to(gl.float32)


@gluon.jit
def scales_and_zeros(tile, SCALES: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales and zeros of tokens, fp32, from a tile in shared memory of fp16 or of pairs as uint32."""
    numbers = tile.load(LAYOUT)
    if SCALES == 1:
        scale = numbers.to(gl.float32)
        zero = scale
    else:
        scale = (numbers & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
        zero = (numbers >> 16).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    return scale, zero


@gluon.jit
def add_weighted(mixed, weights, values, ROWS: gl.constexpr):
    """`mixed [G, C] + sum over r of weights [G, r] values [G ROWS, C]`, all rows r of a thread in one chain."""
    GROUPS: gl.constexpr = weights.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    MIXED: gl.constexpr = mixed.type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(1, MIXED)
    values = values.reshape([GROUPS, ROWS, WIDTH]).permute([0, 2, 1])
    if ROWS == 1:
        weight = gl.convert_layout(weights.reshape([GROUPS]), COLUMN)
        mixed += weight[:, None] * gl.convert_layout(values.reshape([GROUPS, WIDTH]), MIXED)
    elif ROWS == 2:
        even, odd = gl.split(values)
        even_weight, odd_weight = gl.split(weights)
        mixed += gl.convert_layout(even_weight, COLUMN)[:, None] * gl.convert_layout(even, MIXED)
        mixed += gl.convert_layout(odd_weight, COLUMN)[:, None] * gl.convert_layout(odd, MIXED)
    else:
        FEWER: gl.constexpr = ROWS // 2
        even, odd = gl.split(values.reshape([GROUPS, WIDTH, FEWER, 2]))
        even_weight, odd_weight = gl.split(weights.reshape([GROUPS, FEWER, 2]))
        even = even.permute([0, 2, 1]).reshape([GROUPS * FEWER, WIDTH])
        odd = odd.permute([0, 2, 1]).reshape([GROUPS * FEWER, WIDTH])
        mixed = add_weighted(mixed, even_weight, even, FEWER)
        mixed = add_weighted(mixed, odd_weight, odd, FEWER)
    return mixed


@gluon.jit
def stored_column(position, RANK: gl.constexpr, BITS: gl.constexpr):
    """The column of a latent that stands at a column of the product, so that a thread's columns lie side by side.

    A thread of a wgmma result has columns 8 i + 2 q + {0, 1}, q its number in a group of four. In memory it is to find
    its columns in one run of bytes: run q of four, for 4 bits in both nibbles.
    """
    pair = position % 2
    thread = (position // 2) % 4
    if BITS == 4:
        rest = position % (RANK // 2) // 8
        return position // (RANK // 2) * (RANK // 2) + thread * (RANK // 8) + rest * 2 + pair
    else:
        return thread * (RANK // 4) + position // 8 * 2 + pair


@gluon.jit
def true_column(column, width, RANK: gl.constexpr, BITS: gl.constexpr):
    """Where column of a tile of RANK numbers stands among the `width` that there are, and whether it does.

    Tiles are wider than rows, with zeros behind them. 4 bits: both halves of a row, its low and its high nibbles, are
    so widened.
    """
    if BITS == 4:
        place = column % (RANK // 2)
        return column // (RANK // 2) * (width // 2) + place, place < width // 2
    else:
        return column, column < width


@gluon.jit
def in_stored_order(product, ROWS: gl.constexpr, RANK: gl.constexpr, BITS: gl.constexpr):
    """The inverse: `product [ROWS, RANK]` with columns as in memory; low and high halves apart for 4 bits.

    Nothing moves between threads.
    """
    if BITS == 4:
        split = product.reshape([ROWS, 2, RANK // 16, 4, 2]).permute([0, 3, 2, 4, 1])
        return gl.split(split.reshape([ROWS, RANK // 2, 2]))
    else:
        whole = product.reshape([ROWS, RANK // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([ROWS, RANK])
        return whole, whole


@gluon.jit
def in_product_order(low, high, ROWS: gl.constexpr, RANK: gl.constexpr, BITS: gl.constexpr):
    """The inverse of `in_stored_order`: `[ROWS, RANK]` with columns as a left operand in registers has them."""
    if BITS == 4:
        split = gl.join(low, high).reshape([ROWS, 4, RANK // 16, 2, 2])
        return split.permute([0, 4, 2, 1, 3]).reshape([ROWS, RANK])
    else:
        return low.reshape([ROWS, 4, RANK // 8, 2]).permute([0, 2, 1, 3]).reshape([ROWS, RANK])
