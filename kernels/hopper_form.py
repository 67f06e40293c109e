"""What a Hopper kernel is compiled for: padded ranks, and as many stages as shared memory holds."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from .stored_tokens import StoredTokens
from .tiles import AnyTile


SHARED_MEMORY = 227 << 10  # of a program on compute capability 9.0
SCRATCH = 6 << 10  # bytes for what moves between threads, and for barriers
TILE_TOKENS = {"position_query": 128, "tile_reconstruction": 64}
PADDED_RANKS = (32, 64, 128)  # fewer forms to compile than there are ranks
SMALLEST_OPERAND = 64  # rows of a left operand on tensor cores: values of tile reconstruction


class Side(NamedTuple):
    """The form of keys or of values.

    Attributes:
        width: numbers stored of a head.
        bits: of a number.
        scales: numbers of a token's scale: 0, 1, or 2 with a zero.
    """

    width: int
    bits: int
    scales: int

    def padded(self, least: int = 0) -> int:
        """The rank that a kernel is compiled for."""
        return next(rank for rank in PADDED_RANKS if rank >= max(self.width, least))

    def bytes_of(self, padded: int) -> int:
        """Of a token in shared memory, with its scale (something is there without one, too)."""
        return padded * self.bits // 8 + 2 * max(self.scales, 1)


def side_of(stored: StoredTokens) -> Side:
    """The form of stored tokens."""
    return Side(stored.width, stored.bits, 0 if stored.scales is None else stored.scales.shape[3])


class Form(NamedTuple):
    """What a part and a call ask of a kernel.

    Attributes:
        head_dim: channels of a head.
        key, value: `Side`.
        group: query heads of a KV head.
        bias: whether keys have one.
        norm: of keys: 0 for none, 1 before the rotation, 2 behind it.
    """

    head_dim: int
    key: Side
    value: Side
    group: int = 1
    bias: bool = False
    norm: int = 0

    def ranks(self, kernel: str) -> tuple[int, int]:
        """Padded ranks of keys and of values."""
        return self.key.padded(), self.value.padded(SMALLEST_OPERAND if kernel == "tile_reconstruction" else 0)

    @property
    def queries(self) -> int:
        """Columns of a product on tensor cores that hold the group's query heads."""
        return 8 if self.group <= 8 else 16

    @property
    def most_groups(self) -> int:
        """Groups of four warps of tile reconstruction whose registers hold what they work on, as compiling showed."""
        if max(self.ranks("tile_reconstruction")) > 64:
            return 2
        codes = min(self.key.bits, self.value.bits) < 16
        return 3 if codes or self.queries > 8 or self.bias or self.norm else 4

    def constants(self, kernel: str) -> dict[str, int]:
        """Constants of a kernel that do not depend on its tile."""
        key_rank, value_rank = self.ranks(kernel)
        constants = {
            "HEAD_DIM": self.head_dim,
            "KEY_RANK": key_rank,
            "VALUE_RANK": value_rank,
            "KEY_BITS": self.key.bits,
            "VALUE_BITS": self.value.bits,
            "KEY_SCALES": self.key.scales,
            "VALUE_SCALES": self.value.scales,
        }
        if kernel == "tile_reconstruction":
            constants |= {"GROUP": self.group, "QUERIES": self.queries, "NORM": self.norm}
        return constants


def tile_constants(kernel: str, form: Form, tile: AnyTile, heads: int) -> dict[str, int]:
    """Constants of a kernel that follow from its tile: as much of it as the form and `heads` of a part allow.

    Raises:
        ValueError: shared memory does not hold even one stage for each group of warps.
    """
    if kernel == "position_query":
        together = math.gcd(tile.heads, heads)
        stages, rows = stages_that_fit(kernel, form, tile.num_stages, together, 1)
        if stages < 2 and together > 1:  # two stages of one head are faster than one of two
            together = 1
            stages, rows = stages_that_fit(kernel, form, tile.num_stages, together, 1)
        return {"HEADS": together, "STAGES": stages, "ROW_STAGES": rows}
    groups = min(tile.groups, form.most_groups)
    together = math.gcd(tile.heads, heads)
    while groups % together:
        together //= 2
    cramped = groups == 4 or (groups == 3 and form.norm)
    chunk = min(tile.chunk, 32 if cramped else 64, form.head_dim // 2)
    stages, rows = stages_that_fit(kernel, form, tile.num_stages, together, groups)
    return {"HEADS": together, "STAGES": stages, "ROW_STAGES": rows, "GROUPS": groups, "CHUNK": chunk}


@lru_cache(maxsize=1024)
def stages_that_fit(kernel: str, form: Form, most: int, heads: int, groups: int) -> tuple[int, int]:
    """Stages of keys and values, at most so many or one a group, and of rotary rows. ValueError: see `tile_constants`.

    Groups of warps that take tiles in turn have the same stages in each turn: a barrier tells phases apart by parity,
    so that none may wait for one before it has seen the one before. Two stages a group let one fill while the other
    is read.
    """
    key_rank, value_rank = form.ranks(kernel)
    tokens, lanes = TILE_TOKENS[kernel], groups // heads
    stage = tokens * (form.key.bytes_of(key_rank) + form.value.bytes_of(value_rank))
    rows = tokens * 2 * form.head_dim  # cosines and sines
    operands = heads * form.head_dim * key_rank * 2  # U, or W in two halves
    if kernel == "tile_reconstruction":
        floats = value_rank if form.value.bits < 16 else 0
        operands += heads * form.head_dim * (2 * form.queries + 4) + form.head_dim * 4
        operands += groups * 64 * 2 * (form.queries + floats)
    else:
        groups = lanes = 1
    room = SHARED_MEMORY - SCRATCH - operands
    most = max(most // groups, 1)
    turns = {count: (room - count * lanes * rows) // (groups * stage) for count in (2, 1)}  # by stages of rows a lane
    count = 2 if kernel == "tile_reconstruction" and turns[2] >= min(most, 2) else 1
    if turns[count] < 1:
        raise ValueError(
            f"heads={heads}, groups={groups} of {kernel} is not allowed for {form}: stages take {groups * stage} "
            f"bytes, the rest of shared memory {operands + lanes * rows}; allowed: {SHARED_MEMORY - SCRATCH} together"
        )
    return min(most, turns[count]) * groups, count * lanes
