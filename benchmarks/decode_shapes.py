"""The shapes and forms that decode.py measures, by name of a group of rows."""

from __future__ import annotations

from typing import NamedTuple

from hf_wsvd.evaluate.decode_operands import DecodeShape


class Form(NamedTuple):
    """What the cache holds: a code and its bits, see `StoredTokens`."""

    code: str
    bits: int


BF16, FP8, INT8, INT4, INT2 = (
    Form("float", 16),
    Form("fp8", 8),
    *(Form("symmetric", bits) for bits in (8, 4, 2)),
)
MAIN, ALL = (BF16, INT8, INT4), (BF16, FP8, INT8, INT4, INT2)


class Row(NamedTuple):
    """One shape, the forms to measure, and whether every baseline is set up for it."""

    shape: DecodeShape
    forms: tuple[Form, ...]
    all_baselines: bool = True


def _shape(batch: int, tokens: int, heads: tuple[int, int] = (32, 32), head_dim: int = 128, rank: int = 64):
    return DecodeShape(batch, tokens, *heads, head_dim, rank, rank)


ROWS: dict[str, list[Row]] = {
    "mha": [Row(_shape(*sizes), ALL) for sizes in ((1, 32768), (8, 8192), (16, 8192))],
    "gqa": [Row(_shape(*sizes, heads), ALL) for heads in ((32, 8), (28, 4)) for sizes in ((16, 8192), (4, 32768))],
    "head_dim_64": [Row(_shape(*sizes, head_dim=64, rank=32), MAIN) for sizes in ((1, 32768), (8, 8192), (16, 8192))],
    "short": [Row(_shape(1, 1024, heads), MAIN) for heads in ((32, 32), (32, 8))],
    "linear": [
        Row(_shape(1, tokens, heads), MAIN, all_baselines=False)
        for heads in ((32, 32), (32, 8))
        for tokens in (4096, 8192, 16384, 32768, 65536, 131072)
        if (heads, tokens) != ((32, 32), 32768)  # among "mha"
    ],
}
