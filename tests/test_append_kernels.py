"""Kernels that code new tokens and read packed ones, interpreted on the CPU, against the codecs of storage."""

from __future__ import annotations

import re
import sys

import append_cases
import pytest
import torch
from append_cases import Case

from hf_wsvd.kernels.append import append_tokens, encode_tokens, project_append
from hf_wsvd.kernels.append_checks import Slots
from hf_wsvd.kernels.dequantize import dequantize
from hf_wsvd.kernels.encoding import Encoding, encode_oracle
from hf_wsvd.kernels.stored_tokens import StoredTokens
from hf_wsvd.quantizer_config import SCHEME_BITS, StorageSpec
from hf_wsvd.storage import make_store


SPECS = [
    StorageSpec(scheme, bits, None, symmetric)
    for scheme in ("fp8", "minmax", "hadamard", "turboquant")
    for bits in SCHEME_BITS[scheme]
    for symmetric in ((False, True) if scheme in ("minmax", "hadamard") else (False,))
]
ONE_EACH = [
    StorageSpec("minmax", 4, 8),
    StorageSpec("fp8", 8),
    StorageSpec("minmax", 8, None, True),
    StorageSpec("hadamard", 2, None, True),
    StorageSpec("turboquant", 3),
]
MINMAX = StorageSpec("minmax", 4, 16)


def every(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def slow_after(count):
    """One spec of each kind, all but the first slow."""
    return [*ONE_EACH[:count], *(pytest.param(spec, marks=pytest.mark.slow) for spec in ONE_EACH[count:])]


# Coding


@pytest.mark.parametrize("width", [1, 17, 64, 80, 256])
@every([Case(spec, count=8, dtype=dtype) for spec in SPECS for dtype in (torch.float32, torch.float16)])
def test_the_definition_in_torch_is_the_codec_bit_for_bit(case, width, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the constants that only kernels take
    case = Case(case.spec, width, case.count, case.dtype)
    tokens = append_cases.tokens_of(case)
    codec = append_cases.codec_of(case, tokens)
    found = encode_oracle(tokens, codec.encoding())
    assert append_cases.codes_unequal(found, codec.encode(tokens), codec.encoding().code) == [0, 0]


CODED = [
    *(Case(spec, 32) for spec in SPECS),
    *(Case(spec, width, 2, torch.float16, batch=1) for spec in SPECS if spec.scheme == "minmax" for width in (17,)),
    *(Case(spec, 17, 2, batch=1, dtype=dtype) for spec in ONE_EACH[2:] for dtype in (torch.float16, torch.bfloat16)),
    *(Case(StorageSpec("minmax", bits, size), 80, 2) for bits, size in ((4, 16), (2, 40))),
    *(Case(StorageSpec("minmax", bits, size), 20, 2) for bits, size in ((3, 5), (8, 1))),
    *(Case(StorageSpec("hadamard", 4, size, True), 32, 2) for size in (8, 16)),
    *(Case(MINMAX, 32, count, batch=1, capacity=120) for count in (1, 2, 7, 16, 100)),
    Case(StorageSpec("hadamard", 4), 32, 16, batch=1),
    Case(StorageSpec("hadamard", 4, 128), 256, 1, batch=1),  # two rotated blocks
]


@every(CODED)
def test_codes_are_the_codecs_bit_for_bit_and_nothing_else_is_written(case, interpreted):
    assert interpreted(append_cases.appended, case) == ([0, 0], True)


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 48, 96, 128])
@every([Case(spec, dtype=dtype) for spec in SPECS for dtype in (torch.float32, torch.float16)])
def test_codes_of_every_width(case, width, interpreted):
    assert interpreted(append_cases.appended, Case(case.spec, width, 5, case.dtype)) == ([0, 0], True)


@pytest.mark.parametrize("spec", ONE_EACH, ids=append_cases.name)
def test_keys_and_values_take_one_launch(spec, interpreted):
    case, other = Case(spec, 16, position=2), Case(spec, 16, position=9)
    assert interpreted(append_cases.appended_both, case, other) == (1, [[0, 0]] * 2, True)


@pytest.mark.parametrize("other", [Case(StorageSpec("minmax", 2, 16), 32), Case(MINMAX, 16), Case(MINMAX, 32, 4)])
def test_unlike_sides_take_two(other, interpreted):
    assert interpreted(append_cases.appended_both, Case(MINMAX, 32), other) == (2, [[0, 0]] * 2, True)


@pytest.mark.parametrize("start", [0, 7, 22, 24, 2**40, -30])
def test_a_position_on_the_device_is_taken_as_far_as_there_are_slots(start, interpreted):
    assert interpreted(append_cases.appended_at, Case(MINMAX, 16), start) == ([0, 0], True)


@every(
    [
        Case(MINMAX, 16),
        Case(StorageSpec("minmax", 8, None, True), 24, count=1, batch=1),
        Case(StorageSpec("hadamard", 4), 32, count=9),  # more rows than a tile has
        Case(StorageSpec("turboquant", 3), 17, count=2),
        Case(StorageSpec("fp8", 8), 16),
    ]
)
def test_projected_tokens(case, interpreted):
    error, unequal, untouched, alone_is_the_same = interpreted(append_cases.projected, case, 200)
    assert error < 2e-6
    assert unequal == [0, 0]
    assert untouched
    assert alone_is_the_same


# Reading


@every(
    [
        *(Case(spec, 32) for spec in SPECS),
        *(Case(spec, 17, dtype=torch.float16) for spec in SPECS if spec.bits != 4),
        *(Case(StorageSpec(scheme, 3, 20), 80, 1) for scheme in ("minmax", "hadamard")),
        *(Case(StorageSpec(scheme, 16), 24, dtype=torch.float16) for scheme in ("fp16", "bf16")),
        Case(StorageSpec("hadamard", 4, 128), 256, 1, batch=1),
    ]
)
def test_packed_tokens_read_as_they_should(case, interpreted):
    rounding = 1e-6 if case.dtype == torch.float32 else 1e-3
    from_oracle, from_codec, untouched = interpreted(append_cases.read_back, case)
    assert from_oracle < rounding
    assert from_codec < 2 * rounding
    assert untouched


# In stores


@pytest.mark.parametrize(
    ("spec", "kind", "both"),
    [
        *((spec, "growing", True) for spec in ONE_EACH),
        *((spec, kind, False) for spec in ONE_EACH[1:2] for kind in ("growing", "static", "window")),
        (ONE_EACH[0], "growing", False),
        *((spec, "static", True) for spec in ONE_EACH[:2]),
        (ONE_EACH[3], "window", True),
    ],
    ids=append_cases.name,
)
def test_stores_keep_and_read_what_torch_makes_them(spec, kind, both, interpreted):
    found = interpreted(append_cases.stores_unequal, spec, kind, both)
    assert len(found) == 4
    assert not any(any(differ) for differ in found.values()), found


@pytest.mark.parametrize("spec", ONE_EACH[:2], ids=append_cases.name)
def test_stores_of_inference_mode(spec, interpreted):
    assert interpreted(append_cases.in_inference_mode, spec) == 0


@pytest.mark.parametrize("spec", slow_after(1), ids=append_cases.name)
def test_static_steps_compile_to_one_graph(spec, interpreted):
    assert interpreted(append_cases.compiled_unequal, spec) == (1, 0)


@pytest.mark.parametrize("spec", slow_after(1), ids=append_cases.name)
def test_operators_are_what_they_declare(spec, interpreted):
    interpreted(append_cases.check_operators, spec)


def test_a_cpu_without_the_interpreter_runs_no_kernel(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"tokens is on cpu; allowed: CUDA"):
        encode_tokens(torch.zeros(1, 2, 3, 16), Encoding("symmetric", 8, 16, 1))


def test_stores_on_a_cpu_leave_triton_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for module in ("append_kernels", "dequantize_kernel"):
        monkeypatch.setitem(sys.modules, f"hf_wsvd.kernels.{module}", None)  # importing it fails
    store = make_store(MINMAX, "key", 2, 16, torch.float32)
    for count in (3, 1):
        store.append(torch.ones(1, 2, count, 16))
    assert store.read().shape == (1, 2, 4, 16)


# Bad input


TOKENS = torch.zeros(1, 2, 3, 16)
ENCODING = Encoding("asymmetric", 4, 16, 2)
PAYLOAD, SCALES = torch.zeros(1, 2, 8, 8, dtype=torch.uint8), torch.zeros(1, 2, 8, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": TOKENS[0]}, "tokens are [2, 3, 16] torch.float32; allowed: [B, H, n, 16]"),
        ({"tokens": TOKENS[..., :8]}, "tokens are [1, 2, 3, 8]"),
        ({"tokens": TOKENS.double()}, "torch.float64; allowed"),
        ({"code": "lattice"}, "code='lattice' with bits=4 is not allowed"),
        ({"bits": 5}, "code='asymmetric' with bits=5 is not allowed"),
        ({"groups": 3}, "groups=3 is not allowed with code='asymmetric' and width=16"),
        ({"rotation": torch.zeros(5, 5, dtype=torch.int32)}, "a rotation of 5 channels is not allowed"),
        ({"rotation": torch.zeros(8, 8)}, "rotation is [8, 8] torch.float32; allowed: [8, 8] torch.int32"),
        ({"code": "codebook", "groups": 1}, "a rotation of 0 channels is not allowed with code='codebook'"),
        ({"head_scales": torch.ones(3)}, "head_scales is [3] torch.float32; allowed: [2]"),
        ({"payload": PAYLOAD[..., :7]}, "payload is [1, 2, 8, 7] torch.uint8 on cpu; allowed: [1, 2, 8, 8]"),
        ({"payload": PAYLOAD.float()}, "payload is [1, 2, 8, 8] torch.float32"),
        ({"payload": PAYLOAD.transpose(2, 3)}, "the last axis contiguous"),
        ({"payload": PAYLOAD.expand(2, -1, -1, -1)}, "allowed: [1, 2, 8, 8]"),
        ({"scales": None}, "scales is None; allowed: [1, 2, 8, 4] torch.float16"),
        ({"scales": SCALES[:, :, :7]}, "scales is [1, 2, 7, 4]"),
        ({"position": 6}, "position=6 is not allowed for 3 tokens; allowed: 0 to 5"),
        ({"position": -1}, "position=-1 is not allowed"),
        ({"start": torch.zeros(1, dtype=torch.int32)}, "start is [1] torch.int32 on cpu; allowed: one int64"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_launched(changes, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    slots = Slots(PAYLOAD, SCALES)._replace(**{k: v for k, v in changes.items() if k in Slots._fields})
    encoding = ENCODING._replace(**{k: v for k, v in changes.items() if k in Encoding._fields})
    with pytest.raises(ValueError, match=re.escape(message)):
        append_tokens([changes.get("tokens", TOKENS)], [encoding], [slots])


@pytest.mark.parametrize(
    ("inputs", "down", "message"),
    [
        (torch.zeros(1, 16), torch.zeros(2, 16, 16), "inputs is [1, 16]"),
        (torch.zeros(1, 3, 16), torch.zeros(2, 16, 8), "down is [2, 16, 8] torch.float32 on cpu"),
        (torch.zeros(1, 3, 16), torch.zeros(2, 16, 16).half(), "allowed: the same last size, dtype and device"),
        (torch.zeros(1, 3, 16), torch.zeros(2, 12, 16), "down has 12 rows a head; allowed: the encoding's width, 16"),
        (torch.zeros(1, 16, 3).mT, torch.zeros(2, 16, 16), "the last contiguous"),
        (torch.zeros(1, 9, 16), torch.zeros(2, 16, 16), "position=0 is not allowed for 9 tokens"),
    ],
)
def test_factors_that_do_not_fit(inputs, down, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=re.escape(message)):
        project_append(inputs, down, ENCODING, Slots(PAYLOAD, SCALES))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"bits": 6}, {}, "bits=6 is not allowed"),
        ({"width": 20}, {}, "payload is [1, 2, 8, 8] torch.uint8; allowed: [B, H, S, 10]"),
        ({"scales": None}, {}, "scales are None"),
        ({"scales": SCALES.float()}, {}, "scales are [1, 2, 8, 4] torch.float32"),
        ({"scales": SCALES[..., :1]}, {}, "scales are [1, 2, 8, 1]"),
        ({"head_scales": torch.ones(2, 1)}, {}, "head_scales is [2, 1]"),
        ({"code": "codebook", "scales": SCALES[..., :1]}, {}, "levels is None; allowed: [16]"),
        ({}, {"rotation": torch.zeros(3, 3)}, "block a divisor of the width, 16"),
        ({}, {"dtype": torch.float64}, "torch.float64"),
        ({}, {"out": torch.zeros(1, 2, 8, 15)}, "out is [1, 2, 8, 15]"),
        ({}, {"out": torch.zeros(1, 2, 16, 8).mT}, "the last axis contiguous"),
    ],
)
def test_packed_tokens_that_do_not_fit(changes, options, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    stored = StoredTokens(PAYLOAD, SCALES, 16, "asymmetric", 4)._replace(**changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        dequantize(stored, **options)
