"""The calls that kernels_check.py makes: every feature, code and size, at the sizes that models have."""

from __future__ import annotations

from dataclasses import replace

from kernel_cases import DecodeCase


CODED = [
    ("float", 0, 1),
    ("fp8", 8, 1),
    *[("symmetric", bits, 1) for bits in (8, 4, 3, 2)],
    *[("asymmetric", bits, groups) for bits in (8, 4, 3, 2) for groups in (1, 4)],
    *[("codebook", bits, 1) for bits in (4, 3, 2)],
]
LENGTHS = (1, 2, 15, 16, 17, 63, 65, 127, 1000, 4095, 4097, 8193, 32_767, 65_537, 131_072)
DTYPES = ("bfloat16", "float16")

STEP = DecodeCase(batch=2, heads=4, tokens=1000, head_dim=128, key_rank=64, value_rank=64)
GROUPED = replace(STEP, group=4)
SEVEN = replace(STEP, group=7, heads=2)
SEVERAL = replace(GROUPED, queries=5)
# Heads as caches of dense layers keep them: whole, and rotated before they are kept.
WHOLE = {"key_rank": 128, "value_rank": 128, "rotated": 0}


def _of(case: DecodeCase, code: str, bits: int, groups: int = 1) -> DecodeCase:
    return replace(case, code=code, bits=bits, groups=groups)


def _in_16_bits(cases: list[DecodeCase]) -> list[DecodeCase]:
    return [replace(case, dtype=dtype) for dtype in DTYPES for case in cases]


# What the Hopper kernels take, so that they serve these cases where there is such a GPU.
HOPPER_CODES = [("float", 0), *[(code, bits) for code in ("symmetric", "asymmetric") for bits in (8, 4)]]
HOPPER = [
    *[replace(case, code=code, bits=bits) for case in (STEP, GROUPED, SEVEN) for code, bits in HOPPER_CODES],
    *[replace(case, code=code, bits=bits, peak=50.0) for case in (STEP, GROUPED) for code, bits in HOPPER_CODES],
    *[
        replace(case, code=code, bits=bits, tokens=4104, lengths=(4097, 70), poison=True)
        for case in (STEP, GROUPED)
        for code, bits in HOPPER_CODES
    ],
    *[
        replace(STEP, heads=3, head_dim=64, key_rank=32, value_rank=32, code=code, bits=bits)
        for code, bits in HOPPER_CODES
    ],
    *[replace(STEP, key_rank=32, value_rank=32, code=code, bits=bits) for code, bits in HOPPER_CODES],
    *[replace(GROUPED, group=12, batch=1, tokens=tokens) for tokens in (1, 63, 129, 9001)],
    *[replace(STEP, batch=1, tokens=tokens) for tokens in (1, 63, 129, 9001)],
    *[replace(case, row_batch=2, tokens=2000) for case in (STEP, GROUPED)],
    # Ranks as the default allocation gives them; 4 bits in steps of 32.
    *[
        replace(case, key_rank=key_rank, value_rank=value_rank, code=code, bits=bits, head_dim=head_dim)
        for case in (STEP, GROUPED)
        for code, bits in HOPPER_CODES
        for key_rank, value_rank, head_dim in ((16, 48, 128), (80, 96, 128), (112, 128, 128), (128, 32, 64))
        if bits != 4 or not (key_rank % 32 or value_rank % 32)
    ],
    *[
        replace(case, key_rank=key_rank, value_rank=value_rank, code=code, bits=4)
        for case in (STEP, GROUPED)
        for code in ("symmetric", "asymmetric")
        for key_rank, value_rank in ((32, 96), (96, 64), (128, 96))
    ],
    # Batches with padding at the left, and caches of fixed size.
    *[
        replace(case, tokens=4104, code=code, bits=bits, **hidden)
        for case in (STEP, SEVEN)
        for code, bits in HOPPER_CODES
        for hidden in (
            {"mask": "bool"},
            {"starts": (1030, 0), "poison": True},
            {"starts": (1030, 0), "mask": "bool", "lengths": (4000, 2000), "poison": True},
        )
    ],
    # Keys of Qwen2, Qwen3 and others.
    *[
        replace(case, code=code, bits=bits, **keys)
        for case in (GROUPED, SEVEN, replace(SEVEN, key_rank=112, value_rank=80, head_dim=64))
        for code, bits in HOPPER_CODES
        for keys in ({"bias": True}, {"norm": "before"}, {"norm": "after"}, {"bias": True, "norm": "before"})
        if bits != 4 or case.key_rank == 64
    ],
    *[
        replace(case, batch=1, heads=8, tokens=32_768, code=code, bits=bits)
        for case in (STEP, GROUPED)
        for code, bits in HOPPER_CODES
    ],
]


GROUPS: dict[str, list[DecodeCase]] = {
    "Hopper kernels": _in_16_bits(HOPPER),
    "codes": _in_16_bits([_of(case, *form) for form in CODED for case in (STEP, GROUPED)]),
    "codes, several queries": _in_16_bits([_of(SEVERAL, *form) for form in CODED[:6]]),
    "dense heads": _in_16_bits([_of(replace(case, **WHOLE), *form) for form in CODED for case in (STEP, SEVEN)]),
    "peaked": _in_16_bits([_of(replace(case, peak=50.0), *form) for form in CODED[:6] for case in (STEP, GROUPED)]),
    "sizes": _in_16_bits(
        [
            replace(case, head_dim=head_dim, key_rank=key_rank, value_rank=value_rank)
            for case in (STEP, GROUPED)
            for head_dim, key_rank, value_rank in (
                *((64, 32, 32), (80, 40, 80), (96, 48, 32), (128, 77, 63), (128, 16, 112), (256, 128, 100)),
            )
        ]
        + [replace(SEVEN, queries=queries) for queries in (1, 2, 16)]
    ),
    "features": _in_16_bits(
        [
            replace(case, **change)
            for case in (STEP, replace(SEVERAL, code="asymmetric", bits=4, groups=4))
            for change in (
                {"rotated": 64},
                {"rotated": 0},
                {"interleaved": True},
                {"row_batch": 2},
                {"bias": True},
                {"norm": "before", "bias": True},
                {"norm": "after", "rotated": 64},
                {"softcap": 2.0, "peak": 4.0},
                {"window": 300},
                {"mask": "bool"},
                {"mask": "by_head", "window": 300},
                {"mask": "additive"},
                {"mask": "lowest"},
                {"strided": True},
                {"guarded": True, "bias": True},
                {"segments": True},
                {"guarded": True, "segments": True, "places": True},
            )
        ]
    ),
    "NaN behind the ends": _in_16_bits(
        [
            _of(replace(case, lengths=(1000, 5), starts=(901, 0), poison=True, strided=True), *form)
            for case in (STEP, GROUPED)
            for form in CODED[:6]
        ]
        + [replace(STEP, places=True, poison=True, lengths=(960, 1000), code="symmetric", bits=4)]
    ),
    "lengths": _in_16_bits(
        [
            _of(replace(case, batch=1, heads=2, tokens=tokens, bias=bias), code, bits)
            for tokens in LENGTHS
            for code, bits in (("float", 0), ("symmetric", 8), ("symmetric", 4))
            for case, bias in ((STEP, False), (GROUPED, False), (GROUPED, True))
        ]
    ),
}

# For compute-sanitizer: a few of everything, short.
SMALL = [
    replace(case, tokens=97, lengths=None if case.mask else (97, 5), dtype="bfloat16")
    for case in (
        *[_of(case, *form) for form in CODED[:6] for case in (STEP, GROUPED)],
        replace(STEP, head_dim=80, key_rank=33, value_rank=21, strided=True, poison=True),
        replace(SEVERAL, guarded=True, segments=True, places=True, bias=True),
        replace(SEVERAL, mask="by_head", window=30, norm="before"),
    )
]
