"""Fused decode kernels against their definition in fp64, interpreted on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import DecodeCase, found_and_wanted, interpreting_process


@pytest.fixture(scope="module")
def interpreted():
    with interpreting_process() as run:
        yield run


def assert_close(found: np.ndarray, wanted: np.ndarray, case: DecodeCase) -> None:
    assert found.shape == (case.batch, case.queries, case.heads * case.group, case.head_dim)
    assert np.isfinite(found).all()
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    # A score has the rounding errors of a key, times the query's length.
    assert error < (2e-6 if case.dtype == "float32" else 1e-3) * max(1.0, case.peak / 2)


CODED = [
    *[("symmetric", bits, 1) for bits in (8, 4, 3, 2)],
    *[("asymmetric", bits, groups) for bits in (8, 4, 3, 2) for groups in (1, 4)],
    *[("codebook", bits, 1) for bits in (4, 3, 2)],
    ("fp8", 8, 1),
]
WIDE = {"group": 2, "queries": 3}

CASES = [
    DecodeCase(),
    DecodeCase(dtype="float16", **WIDE),
    *[DecodeCase(code=code, bits=bits, groups=groups, **WIDE) for code, bits, groups in CODED],
    # Heads that are kept whole, in code; ranks that fill no byte, no group of 16 and no power of two.
    *[
        DecodeCase(code=code, bits=bits, groups=groups, key_rank=16, value_rank=16, rotated=8)
        for code, bits, groups in CODED
        if bits in (8, 3)
    ],
    *[
        DecodeCase(code=code, bits=bits, key_rank=key_rank, value_rank=21 - key_rank, dtype="float16")
        for code, bits, key_rank in (("symmetric", 4, 5), ("asymmetric", 3, 13), ("codebook", 2, 7), ("fp8", 8, 1))
    ],
    *[
        DecodeCase(head_dim=head_dim, key_rank=key_rank, value_rank=value_rank, dtype=dtype, **WIDE)
        for head_dim, key_rank, value_rank, dtype in (
            (64, 32, 24, "float32"),
            (80, 80, 33, "float16"),
            (96, 48, 96, "float32"),
            (128, 77, 64, "float16"),
            (256, 100, 128, "float32"),
        )
    ],
    *[DecodeCase(queries=queries, group=group) for queries, group in ((16, 1), (2, 7), (16, 5))],
    *[DecodeCase(tokens=tokens, queries=min(tokens, 2), rotated=8) for tokens in (1, 2, 63, 64, 65, 129, 200)],
    *[
        DecodeCase(rotated=rotated, interleaved=interleaved, bias=True, key_rank=key_rank, **WIDE)
        for rotated, interleaved, key_rank in (
            (0, False, 8),
            (0, False, 16),
            (8, False, 16),
            (8, True, 8),
            (16, True, 8),
        )
    ],
    DecodeCase(head_dim=80, rotated=32, interleaved=True, key_rank=80, row_batch=2),
    *[
        DecodeCase(norm=norm, rotated=rotated, bias=True, **WIDE)
        for norm, rotated in (("before", 16), ("before", 8), ("after", 16), ("after", 8), ("after", 0))
    ],
    DecodeCase(softcap=2.0, peak=4.0, mask="bool", **WIDE),
    *[DecodeCase(mask=mask, window=window, **WIDE) for mask, window in (("bool", None), ("by_head", 20))],
    *[DecodeCase(mask=mask, dtype=dtype) for mask in ("additive", "lowest") for dtype in ("float32", "float16")],
    *[DecodeCase(window=window, tokens=150, **WIDE) for window in (1, 40, 1000)],
    DecodeCase(lengths=(70, 31), starts=(3, 30), window=20, row_batch=2, **WIDE),
    *[
        DecodeCase(code=code, bits=bits, lengths=(70, 5), starts=(33, 0), poison=True, bias=True, group=2)
        for code, bits in (("float", 0), ("fp8", 8), ("asymmetric", 4))
    ],
    DecodeCase(lengths=(64, 100), tokens=70),  # a length that is none
    *[
        DecodeCase(places=True, poison=True, code=code, bits=bits, lengths=(60, 70), window=window, **WIDE)
        for code, bits, window in (("float", 0, None), ("symmetric", 4, 30))
    ],
    DecodeCase(places=True, rotated=0, mask="by_head", **WIDE),
    *[
        DecodeCase(
            heads=3, guarded=guarded, segments=segments, places=places, code="asymmetric", bits=4, bias=True, **WIDE
        )
        for guarded, segments, places in ((True, False, False), (False, True, False), (True, True, True))
    ],
    DecodeCase(heads=3, guarded=True, segments=True, lengths=(20, 70), code="symmetric", bits=2, dtype="float16"),
    *[DecodeCase(strided=True, code=code, bits=bits) for code, bits in (("float", 0), ("asymmetric", 3))],
    *[
        DecodeCase(
            peak=50.0, tokens=150, head_dim=64, key_rank=32, value_rank=32, code=code, bits=bits, group=2, dtype=dtype
        )
        for code, bits in (("float", 0), ("symmetric", 4))
        for dtype in ("float32", "float16")
    ],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_the_definition(interpreted, case):
    assert_close(*interpreted(found_and_wanted, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("code", "bits", "groups"), [("float", 0, 1), *CODED])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("rank", "rotated"), [(48, 64), (24, 32), (64, 64), (64, 0)])
def test_kernels_match_the_definition_for_every_code(interpreted, dtype, code, bits, groups, group, rank, rotated):
    case = DecodeCase(
        *(dtype, 2, 2, group, 2, 131, 64, rank, rank, code, bits, groups, rotated), peak=10.0, starts=(0, 7)
    )
    assert_close(*interpreted(found_and_wanted, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", range(1, 201, 3))
def test_kernels_match_the_definition_at_every_length(interpreted, tokens):
    case = DecodeCase(tokens=tokens, lengths=(tokens, max(1, tokens - 70)), poison=True, code="asymmetric", bits=4)
    assert_close(*interpreted(found_and_wanted, case), case)
