"""Fused decode kernels against their definition in fp64, interpreted on the CPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from kernel_cases import (
    DecodeCase,
    check_operator,
    compiled_and_eager,
    found_and_wanted,
    operands,
    split_and_merged,
)

from hf_wsvd.kernels.dequantize import read_tokens
from hf_wsvd.kernels.fused_attention import fused_attention
from hf_wsvd.kernels.latent_heads import Rotation
from hf_wsvd.kernels.ops import results_of_parts
from hf_wsvd.kernels.stored_tokens import DecodePart, KeyNormWeights
from hf_wsvd.storage.fp8 import Fp8Codec
from hf_wsvd.storage.hadamard import HadamardCodec
from hf_wsvd.storage.minmax import MinMaxCodec
from hf_wsvd.storage.turboquant import TurboQuantCodec


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
WIDE = {"group": 2, "queries": 3, "batch": 1}
ASYMMETRIC = {"code": "asymmetric", "bits": 4}

CASES = [
    DecodeCase(),
    DecodeCase(dtype="float16", **WIDE),
    *[DecodeCase(code=code, bits=bits, groups=groups, **WIDE) for code, bits, groups in CODED],
    # Heads that are kept whole, in code; ranks that fill no byte, no group of 16 and no power of two.
    *[
        DecodeCase(code=code, bits=bits, groups=groups, key_rank=16, value_rank=16, rotated=8, batch=1)
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
    *[DecodeCase(queries=queries, group=group, batch=1) for queries, group in ((16, 1), (2, 7))],
    DecodeCase(queries=16, group=5, batch=1, heads=1),
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
    DecodeCase(lengths=(70, 31), starts=(3, 30), window=20, row_batch=2, group=2, queries=3),
    *[
        DecodeCase(code=code, bits=bits, lengths=(70, 5), starts=(33, 0), poison=True, bias=True, group=2)
        for code, bits in (("float", 0), ("fp8", 8), ("asymmetric", 4))
    ],
    DecodeCase(lengths=(64, 100), tokens=70),  # a length that is none
    *[
        DecodeCase(places=True, poison=True, code=code, bits=bits, lengths=(60, 70), window=window, queries=2)
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


def test_a_query_with_nothing_to_see_gets_zeros(interpreted):
    """Not even the values' bias."""
    case = DecodeCase(batch=3, queries=2, lengths=(70, 0, 20), starts=(3, 0, 20), bias=True, guarded=True)
    found, _ = interpreted(found_and_wanted, case)
    assert np.abs(found[0]).min() > 0
    assert not found[1:].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sequence_that_an_additive_mask_hides_gets_zeros(interpreted, dtype):
    """The lowest number of its dtype is what models write for hidden, also where that hides all."""
    found, wanted = interpreted(found_and_wanted, DecodeCase(dtype=dtype, mask="blind", bias=True))
    assert not found[0].any()
    assert not wanted[0].any()
    assert np.abs(found[1]).min() > 0


@pytest.mark.parametrize("split_tokens", [16, 48, 96])
def test_both_stages_match_their_twins_for_any_split(interpreted, split_tokens):
    case = DecodeCase(group=3, queries=2, lengths=(70, 20), value_rank=16, bias=True, code="symmetric", bits=8)
    for found, wanted in interpreted(split_and_merged, case, split_tokens).values():
        np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-6)


def test_the_operator_is_one_that_torch_can_trace(interpreted):
    interpreted(check_operator, DecodeCase(lengths=(70, 20), norm="before", guarded=True, **ASYMMETRIC))


def test_a_call_is_traced_into_one_graph(interpreted):
    case = DecodeCase(lengths=(70, 20), mask="bool", norm="before", segments=True, softcap=3.0, **ASYMMETRIC)
    found, wanted = interpreted(compiled_and_eager, case)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("heads", "results"),
    [
        ([(0, 1)], [0]),
        ([(0, 2), (1,)], [0, 0]),
        ([(0, 1), (0, 1)], [0, 1]),
        ([(1,), (0, 2), (1,), (0, 2)], [0, 0, 1, 1]),
        ([(0, 1), (0,), (1,)], [0, 1, 1]),
    ],
)
def test_parts_share_a_result_unless_they_have_a_head_in_common(heads, results):
    assert results_of_parts(heads) == results


@pytest.mark.parametrize(
    "codec",
    [
        *[MinMaxCodec(24, bits, 8, symmetric) for bits in (8, 4, 3, 2) for symmetric in (False, True)],
        MinMaxCodec(13, 3),
        HadamardCodec(24, 4),
        *[TurboQuantCodec(24, bits) for bits in (4, 3, 2)],
        Fp8Codec(24),
    ],
    ids=lambda codec: type(codec).__name__ + str(getattr(codec, "bits", "")),
)
def test_the_oracle_reads_what_codecs_keep(codec):
    codec.to(torch.device("cpu"))
    packed = codec.encode(torch.randn(2, 3, 5, codec.width))
    tokens = read_tokens(codec.stored(packed))
    if codec.rotation() is not None:
        tokens = tokens @ codec.rotation().double().T
    torch.testing.assert_close(tokens, codec.decode(packed, torch.float32).double(), rtol=1e-5, atol=1e-5)


def changed_part(**fields):
    return lambda args, keywords: args[1].__setitem__(0, args[1][0]._replace(**fields))


def changed_key(**fields):
    return lambda args, keywords: args[1].__setitem__(0, args[1][0]._replace(key=args[1][0].key._replace(**fields)))


def changed(position: int, value):
    return lambda args, keywords: args.__setitem__(position, value(args[position]))


def without_heads(part):
    """The same part with its axis of heads empty."""

    def cut(tensor):
        return None if tensor is None else tensor[:0]

    key, value = (
        stored._replace(payload=stored.payload[:, :0], scales=stored.scales[:, :0])
        for stored in (part.key, part.value)
    )
    return DecodePart(key, value, cut(part.key_up), cut(part.value_up), cut(part.key_bias), cut(part.value_bias))


REFUSED = {
    "query=": changed(0, lambda query: query[0]),
    "query.dtype=": changed(0, lambda query: query.double()),
    "query.shape[1]=3": changed(0, lambda query: query[:, :3]),
    "query.shape[2]=17": changed(0, lambda query: query[:, :, :1].expand(-1, -1, 17, -1)),
    "query.shape[3]=272": changed(0, lambda query: query.repeat(1, 1, 1, 17)),
    "query.stride()": changed(0, lambda query: query.repeat(1, 1, 1, 2)[..., ::2]),
    "query.device=meta": changed(0, lambda query: query.to("meta")),
    "parts=[]": changed(1, lambda parts: []),
    "parts=(no tokens of heads [0])": changed_part(heads=(1, 2)),
    "parts=(tokens of 5 KV heads)": changed_part(heads=(0, 4)),
    "parts=(tokens of 0 KV heads)": changed(1, lambda parts: [without_heads(parts[0])]),
    "parts=(tokens of 0 KV heads) is": changed(1, lambda parts: [without_heads(parts[0])._replace(heads=())]),
    "parts[0].heads=(0, 0)": changed_part(heads=(0, 0)),
    "parts[0].heads=(0,)": changed_part(heads=(0,)),
    "parts[0].first=-1": changed_part(first=-1),
    "parts[0].places=": changed_part(places=torch.zeros(2, 71, dtype=torch.int32)),
    "parts[0].places.dtype=": changed_part(places=torch.zeros(2, 70, dtype=torch.int64)),
    "parts[0].key_up=None": changed_part(key_up=None),
    "parts[0].key_up=[2, 16, 9]": changed_part(key_up=torch.zeros(2, 16, 9)),
    "parts[0].key_up.stride()": changed_part(key_up=torch.zeros(2, 8, 16).transpose(1, 2)),
    "parts[0].key_up.device=meta": changed_part(key_up=torch.zeros(2, 16, 8, device="meta")),
    "parts[0].value_bias=[2, 15]": changed_part(value_bias=torch.zeros(2, 15)),
    "parts[0].key.code='int4'": changed_key(code="int4"),
    "parts[0].key.bits=5": changed_key(bits=5),
    "parts[0].key.width=0": changed_key(width=0),
    "parts[0].key.payload=[2, 2, 70, 4]": changed_key(bits=8),
    "parts[0].key.payload.dtype=": changed_key(payload=torch.zeros(2, 2, 70, 4)),
    "parts[0].key.payload.stride()": changed_key(payload=torch.zeros(2, 2, 4, 70, dtype=torch.uint8).mT),
    "parts[0].key.scales=None": changed_key(scales=None),
    "parts[0].key.scales=[2, 2, 70, 3]": changed_key(scales=torch.zeros(2, 2, 70, 3).half()),
    "parts[0].key.scales=[2, 2, 70, 6]": changed_key(scales=torch.zeros(2, 2, 70, 6).half()),
    "parts[0].key.scales=[] ": changed_key(scales=torch.tensor(1.0).half()),
    "parts[0].key.scales.dtype=": changed_key(scales=torch.zeros(2, 2, 70, 2)),
    "parts[0].key.head_scales=": changed_key(head_scales=torch.ones(2)),
    "parts[0].key.levels=": changed_key(levels=torch.zeros(16)),
    "rotation.cos=": changed(2, lambda rows: rows._replace(cos=rows.cos[:, :69])),
    "rotation.sin=": changed(2, lambda rows: rows._replace(sin=rows.sin[..., :7])),
    "mask=": changed(3, lambda mask: torch.ones(2, 1, 1, 69).bool()),
    "mask.dtype=": changed(3, lambda mask: torch.ones(2, 1, 1, 70).int()),
    "lengths=[3]": lambda args, keywords: keywords.update(lengths=torch.zeros(3, dtype=torch.int32)),
    "lengths.dtype=": lambda args, keywords: keywords.update(lengths=torch.zeros(2, dtype=torch.int64)),
    "starts=[1]": lambda args, keywords: keywords.update(starts=torch.zeros(1, dtype=torch.int32)),
    "softcap=0": lambda args, keywords: keywords.update(softcap=0.0),
    "softcap=inf": lambda args, keywords: keywords.update(softcap=float("inf")),
    "window=0": lambda args, keywords: keywords.update(window=0),
    "norm.weight=[15]": lambda args, keywords: keywords.update(norm=KeyNormWeights(torch.ones(15), 1e-6)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_named_before_anything_is_launched(message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    args, keywords = operands(DecodeCase(group=2, queries=2, **ASYMMETRIC))
    REFUSED[message](args, keywords)
    with pytest.raises(ValueError, match=re.escape(message)):
        fused_attention(*args, **keywords)


def test_the_length_of_a_sequence_must_be_known(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    args, keywords = operands(DecodeCase(rotated=0, places=True))
    with pytest.raises(ValueError, match="lengths"):
        fused_attention(*args, **keywords)


@pytest.mark.parametrize(
    ("rotated", "position", "value", "message"),
    [
        (16, 2, Rotation(torch.ones(70), torch.ones(70)), "rotation.cos=[70]"),
        (0, 3, torch.tensor(True), "mask=[]"),
    ],
    ids=["rotation", "mask"],
)
def test_what_tells_the_length_must_have_an_axis_of_places(rotated, position, value, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    args, keywords = operands(DecodeCase(rotated=rotated, places=True))
    args[position] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        fused_attention(*args, **keywords)


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    args, keywords = operands(DecodeCase())
    with pytest.raises(ValueError, match=re.escape("query.device=cpu")):
        fused_attention(*args, **keywords)


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
