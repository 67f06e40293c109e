"""What a Hopper kernel is compiled for: padded ranks, and as many stages as shared memory holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .stored_tokens import StoredTokens


SHARED_MEMORY = 227 << 10  # of a program on compute capability 9.0
SCRATCH = 5 << 10  # for what moves between threads of all groups, and barriers
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

    def constants(self, kernel: str) -> dict[str, int]:
        """Constants of the kernel that do not depend on its tile."""
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
