"""Token-wise storage codecs: layout, error bounds, and that no token depends on another."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_wsvd.kernels.packing import pack, packed_width, unpack
from hf_wsvd.quantizer_config import SCHEME_BITS, StorageSpec
from hf_wsvd.rotations import spreading_rotation
from hf_wsvd.storage.codec import Packed
from hf_wsvd.storage.hadamard import block_size, rotate, rotation_constants, to_integers
from hf_wsvd.storage.registry import make_codec, register_codec
from hf_wsvd.storage.turboquant import normal_centroids


WIDTHS = [1, 5, 17, 64, 80, 96, 128, 256]
SPECS = [
    StorageSpec(scheme, bits, None, symmetric)
    for scheme, all_bits in SCHEME_BITS.items()
    for bits in all_bits
    for symmetric in ((False, True) if scheme in ("minmax", "hadamard") else (False,))
    if scheme != "kivi"
]
INTEGERS = [spec for spec in SPECS if spec.scheme in ("minmax", "hadamard")]
TURBOQUANT = [spec for spec in SPECS if spec.scheme == "turboquant"]


def name(value):
    if not isinstance(value, StorageSpec):
        return None
    return f"{value.scheme}-{value.bits}" + ("-symmetric" if value.symmetric else "")


def every(specs):
    return pytest.mark.parametrize("spec", specs, ids=name)


def codec_of(spec, width, device="cpu"):
    codec = make_codec(spec, width)
    codec.to(torch.device(device))
    return codec


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def same(a, b):
    """Bit for bit, NaN included."""
    return all(x.shape == y.shape and torch.equal(bits_of(x), bits_of(y)) for x, y in zip(a, b, strict=True))


def bits_of(x):
    return x.contiguous().view(torch.uint8) if x.numel() else x


# Packing


def test_layout_of_4_bits():
    codes = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [1 | 4 << 4, 2 | 5 << 4, 3 | 6 << 4]


def test_layout_of_2_bits():
    codes = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0], dtype=torch.uint8)
    assert pack(codes, 2).tolist() == [0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4 | 0 << 6]


def test_layout_of_3_bits_is_a_plane_of_low_pairs_and_one_of_high_bits():
    codes = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    assert pack(codes, 3).tolist() == [0b10001000, 0b11011101, 0b11110000]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("width", [*WIDTHS, 2, 3, 4, 7, 8, 9])
def test_packing_is_a_bijection(bits, width):
    """Codes come back, and in full bytes every byte string is that of some codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (2, 3, 7, width), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, 7, packed_width(width, bits))
    assert torch.equal(unpack(packed, width, bits), codes)
    if width % 8 == 0:
        assert packed_width(width, bits) * 8 == width * bits
        string = torch.randint(0, 256, packed.shape, generator=generator, dtype=torch.uint8)
        assert torch.equal(pack(unpack(string, width, bits), bits), string)


def test_bits_that_do_not_exist():
    with pytest.raises(ValueError, match=r"bits=5 is not allowed.*8, 4, 3, 2"):
        pack(torch.zeros(4, dtype=torch.uint8), 5)


# Errors


@every([spec for spec in SPECS if spec.bits == 16])
def test_casts_read_as_the_cast(spec):
    x = gaussian(2, 3, 9, 64)
    codec = codec_of(spec, 64)
    dtype = torch.bfloat16 if spec.scheme == "bf16" else torch.float16
    assert torch.equal(codec.decode(codec.encode(x), torch.float32), x.to(dtype).float())


@every([spec for spec in SPECS if spec.scheme == "fp8"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_is_within_half_of_its_spacing(spec, size, dtype):
    x = gaussian(2, 3, 50, 64) * size
    codec = codec_of(spec, 64)
    read = codec.decode(codec.encode(x), dtype).double()
    scale = 2 * x.double().abs().amax(dim=(0, 2, 3), keepdim=True) / 448
    torch.testing.assert_close(codec.state["scale"].double(), scale, rtol=1e-6, atol=0)
    bound = torch.maximum(x.double().abs() / 16, scale * 2**-10) * 1.001  # 3 bits of mantissa; spacing 2^-9 at zero
    assert ((read - x.double()).abs() <= bound + (1e-7 if dtype == torch.float16 else 0)).all()


@every(INTEGERS)
@pytest.mark.parametrize(("width", "group_size"), [(64, None), (64, 16), (80, None), (256, None), (17, None)])
def test_integers_are_within_half_a_step(spec, width, group_size):
    """Against a range and a rotation in fp64: half a step of the group, and the rounding of fp16 scales."""
    x = gaussian(2, 3, 40, width) * 3 + 1
    codec = codec_of(spec._replace(group_size=group_size), width)
    read = codec.decode(codec.encode(x), torch.float32).double()
    exact = x.double()
    if spec.scheme == "hadamard":
        rotation = torch.block_diag(*[spreading_rotation(block_size(width))] * (width // block_size(width)))
        exact, read = exact @ rotation, read @ rotation
    groups = exact.unflatten(-1, (-1, group_size or width))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = groups.abs().amax(-1, keepdim=True)
    levels = {8: 254, 4: 14, 3: 7, 2: 3}[spec.bits] if spec.symmetric else 2**spec.bits - 1
    span = 2 * largest if spec.symmetric else high - low
    error = (read.unflatten(-1, groups.shape[-2:]) - groups).abs()
    assert (error <= span / levels / 2 + span * 2**-10 + largest * 2**-10).all()


@every(TURBOQUANT)
@pytest.mark.parametrize("width", [64, 80, 256])
def test_turboquant_against_the_formula(spec, width):
    """Directions are those of nearest centroids in fp64, and lengths those of the tokens."""
    x = gaussian(2, 3, 40, width) * 5
    codec = codec_of(spec, width)
    read = codec.decode(codec.encode(x), torch.float32).double()
    exact, rotation = x.double(), spreading_rotation(width)
    norm = exact.norm(dim=-1, keepdim=True)
    centroids = torch.tensor(normal_centroids(spec.bits), dtype=torch.float64)
    spread = exact @ rotation * width**0.5 / norm
    nearest = centroids[(spread[..., None] - centroids).abs().argmin(-1)]
    expected = nearest / nearest.norm(dim=-1, keepdim=True) * norm @ rotation.T
    torch.testing.assert_close(read, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(read.norm(dim=-1, keepdim=True), norm, rtol=1e-3, atol=0)


# Mean squared error of the best 2, 3 and 4-bit codes of a normal number (Max 1960, table 1).
@pytest.mark.parametrize(("bits", "distortion"), [(4, 0.009497), (3, 0.03454), (2, 0.1175)])
def test_turboquant_reaches_the_distortion_of_lloyd_and_max(bits, distortion):
    x = gaussian(1, 1, 4000, 64)
    codec = codec_of(StorageSpec("turboquant", bits), 64)
    assert (codec.decode(codec.encode(x), torch.float32) - x).square().mean() < distortion * 1.02


@pytest.mark.parametrize(
    ("bits", "positive"),
    [
        (2, [0.4528, 1.5104]),
        (3, [0.2451, 0.7560, 1.3439, 2.1519]),
        (4, [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326]),
    ],
)
def test_centroids_of_lloyd_and_max(bits, positive):
    levels = normal_centroids(bits)
    assert levels[2 ** (bits - 1) :] == pytest.approx(positive, abs=1e-3)
    assert levels == tuple(-level for level in reversed(levels))


def test_rotation_removes_what_an_outlier_channel_costs():
    x = gaussian(1, 2, 200, 64)
    x[..., 3] *= 40
    errors = {}
    for scheme in ("minmax", "hadamard", "turboquant"):
        codec = codec_of(StorageSpec(scheme, 4), 64)
        errors[scheme] = (codec.decode(codec.encode(x), torch.float32) - x).square().mean()
    assert errors["hadamard"] < errors["minmax"] / 4
    assert errors["turboquant"] < errors["minmax"] / 4


@every(SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_little_to_the_error(spec, dtype):
    x = gaussian(1, 2, 200, 64)
    codec = codec_of(spec, 64)
    packed = codec.encode(x)
    wide, half = codec.decode(packed, torch.float32), codec.decode(packed, dtype)
    assert half.dtype == dtype
    rounding = 0 if spec.bits == 8 else torch.finfo(dtype).eps ** 2 / 3
    assert (half - x).square().mean() <= 1.2 * (wide - x).square().mean() + rounding


# Form


@every(SPECS)
@pytest.mark.parametrize("width", [64, 128])
def test_bits_an_element(spec, width):
    packed = codec_of(spec, width).encode(gaussian(1, 2, 3, width))
    assert packed.scales.dtype == torch.float16
    size = sum(part[0, 0, 0].numel() * part.element_size() for part in packed) * 8 / width
    numbers = {"minmax": 2 - spec.symmetric, "hadamard": 2 - spec.symmetric, "turboquant": 1}.get(spec.scheme, 0)
    assert size == spec.bits + 16 * numbers / width


@every(SPECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_no_tokens_and_strides(spec, width):
    x = gaussian(2, 6, 3, width).transpose(1, 2)
    codec = codec_of(spec, width)
    none = codec.encode(x[:, :, :0])
    assert codec.decode(none, torch.bfloat16).shape == (2, 3, 0, width)
    packed = codec.encode(x)
    read = codec.decode(packed, torch.float32)
    assert read.shape == x.shape
    assert same(packed, codec_of(spec, width).encode(x.contiguous()))
    assert [part.shape[-1] for part in none] == [part.shape[-1] for part in packed]
    if spec.bits >= 4 and width >= 5:
        assert (read - x).norm() < 0.2 * x.norm()


@every(SPECS)
def test_meta(spec):
    x = gaussian(2, 3, 4, 80)
    codec = codec_of(spec, 80, "meta")
    packed = codec.encode(x.to("meta"))
    on_cpu = codec_of(spec, 80).encode(x)
    assert [(part.shape, part.dtype) for part in packed] == [(part.shape, part.dtype) for part in on_cpu]
    assert codec.decode(packed, torch.bfloat16).shape == x.shape


@every([spec for spec in SPECS if spec.scheme != "hadamard" or spec.bits == 4])
def test_compile(spec):
    x = gaussian(1, 2, 3, 64)
    codec = codec_of(spec, 64)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def both(tokens):
        packed = codec.encode(tokens)
        return packed, codec.decode(packed, torch.float32)

    packed, read = both(x)
    other = codec_of(spec, 64)
    expected = other.encode(x)
    assert same(packed, expected)
    torch.testing.assert_close(read, other.decode(expected, torch.float32))


# Independence


@every(SPECS)
@pytest.mark.parametrize("width", [64, 80, 128])
def test_tokens_one_by_one_are_bit_for_bit_tokens_together(spec, width):
    """The first token, encoded before, sets the scale of fp8."""
    x = gaussian(1, 2, 40, width) * torch.logspace(-3, 2, 40)[:, None]
    codec = codec_of(spec, width)
    codec.encode(x[:, :, :1])
    together = codec.encode(x)
    singly = [codec.encode(x[:, :, n : n + 1]) for n in range(x.shape[2])]
    assert same(together, Packed(*(torch.cat(parts, dim=2) for parts in zip(*singly, strict=True))))


@pytest.mark.parametrize("width", [64, 80, 128])
def test_rotations_of_thousands_of_tokens_do_not_depend_on_their_number(width):
    integers, _ = to_integers(gaussian(4096, width))
    rotation = rotation_constants(width, torch.device("cpu"))["integers"]
    together = rotate(integers, rotation)
    for size in (1, 7, 64):
        assert torch.equal(torch.cat([rotate(piece, rotation) for piece in integers.split(size)]), together)
    backwards = rotate(integers.flip(-1), rotation.flip(0))  # the same sums in another order
    assert torch.equal(backwards, together)


@every(SPECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_stays_with_its_token_and_head(spec, bad):
    x = gaussian(2, 3, 5, 64)
    x[..., 0] = 9  # the largest of every head stays
    broken = x.clone()
    broken[1, 2, 3, 7] = bad
    codec, other = codec_of(spec, 64), codec_of(spec, 64)
    clean, read = (c.decode(c.encode(tokens), torch.float32) for c, tokens in ((codec, x), (other, broken)))
    untouched = torch.ones(2, 3, 5, dtype=torch.bool)
    untouched[1, 2, 3] = False
    assert torch.equal(read[untouched], clean[untouched])
    if spec.bits == 16:
        assert torch.equal(read[1, 2, 3, 7], torch.tensor(bad)) | math.isnan(bad)
        assert read[1, 2, 3].isfinite().sum() == 63
    elif spec.scheme == "fp8":
        expected = torch.tensor(bad).clamp(-448, 448) * other.state["scale"][0, 2, 0, 0]
        torch.testing.assert_close(read[1, 2, 3, 7], expected, equal_nan=True)
        assert read[1, 2, 3].isfinite().sum() >= 63
    else:
        assert read[1, 2, 3].isnan().all()


def test_a_non_finite_number_stays_with_its_group():
    x = gaussian(1, 1, 2, 64)
    x[0, 0, 1, 20] = math.nan
    codec = codec_of(StorageSpec("minmax", 4, 16), 64)
    bad = codec.decode(codec.encode(x), torch.float32).isnan()
    assert bad[0, 0, 1, 16:32].all()
    assert bad.sum() == 16


# Range


@every(SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_numbers_saturate(spec, dtype):
    x = gaussian(1, 2, 6, 64)
    x[:, :, 1] *= 1e6
    x[:, :, 2] = 65504
    x[:, :, 3] = -65504
    x[:, :, 3, ::2] = 65504
    x[:, :, 4, 5] = 1e30
    if spec.scheme == "bf16" and dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)  # bf16 holds more than fp16 does
    codec = codec_of(spec, 64)
    if spec.scheme == "fp8":
        codec.encode(x[:, :, :1])
    read = codec.decode(codec.encode(x), dtype)
    if spec.scheme in ("minmax", "fp16", "fp8", "bf16") or dtype == torch.float32:
        assert read.isfinite().all()


@every(SPECS)
def test_zeros_read_as_zeros_and_constants_as_themselves(spec):
    codec = codec_of(spec, 64)
    zeros = codec.encode(torch.zeros(1, 2, 3, 64))
    assert codec.decode(zeros, torch.float32).eq(0).all()
    codec.reset()
    read = codec.decode(codec.encode(torch.full((1, 2, 3, 64), 2.0)), torch.float32)
    if spec.scheme not in ("hadamard", "turboquant"):
        torch.testing.assert_close(read, torch.full_like(read, 2.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize("first", [0.0, math.nan])
def test_fp8_without_a_finite_number_has_scale_1(first):
    codec = codec_of(StorageSpec("fp8", 8), 64)
    codec.encode(torch.full((1, 2, 1, 64), first))
    assert codec.state["scale"].tolist() == [[[[1.0]], [[1.0]]]]


def test_fp8_scale_is_one_a_head_and_stays():
    codec = codec_of(StorageSpec("fp8", 8), 64)
    x = gaussian(2, 3, 4, 64)
    codec.encode(x)
    scale = codec.state["scale"].clone()
    assert scale.shape == (1, 3, 1, 1)
    codec.encode(x * 100)
    assert torch.equal(codec.state["scale"], scale)
    clone = copy.deepcopy(codec)
    codec.reset()
    assert codec.state == {}
    assert torch.equal(clone.state["scale"], scale)


@every(SPECS)
def test_nothing_of_the_autograd_graph_is_kept(spec):
    codec = codec_of(spec, 64)
    packed = codec.encode(gaussian(1, 2, 3, 64).requires_grad_())
    assert not any(part.requires_grad for part in (*packed, *codec.state.values()))


# Registry


def test_group_size_that_does_not_divide():
    message = r"group_size=48 is not allowed with width=64; allowed: a divisor, one of \[1, 2, 4, 8, 16, 32, 64\]"
    for scheme in ("minmax", "hadamard"):
        with pytest.raises(ValueError, match=message):
            make_codec(StorageSpec(scheme, 4, 48), 64)


@pytest.mark.parametrize("scheme", ["kivi", None])
def test_schemes_that_are_no_codec(scheme):
    with pytest.raises(ValueError, match=rf"scheme={scheme!r} is not allowed; allowed: one of .*'turboquant'"):
        make_codec(StorageSpec(scheme), 64)


def test_registered_codecs_are_made(monkeypatch):
    monkeypatch.setattr("hf_wsvd.storage.registry._BUILDERS", {})
    register_codec("own", lambda spec, width: (spec.bits, width))
    assert make_codec(StorageSpec("own", 5), 64) == (5, 64)


# For kernels


@every(SPECS)
@pytest.mark.parametrize("width", [64, 80, 256])
def test_tokens_as_kernels_take_them_read_the_same(spec, width):
    """`scale * level + zero` of `StoredTokens`, turned back by the codec's rotation."""
    spec = spec._replace(group_size=16) if spec.scheme in ("minmax", "hadamard") else spec
    codec = codec_of(spec, width)
    packed = codec.encode(gaussian(2, 3, 5, width))
    stored = codec.stored(packed)
    assert stored.width == width
    if stored.code == "float":
        numbers = stored.payload.float()
    elif stored.code == "fp8":
        numbers = stored.payload.view(torch.float8_e4m3fn).float() * stored.head_scales[:, None, None]
    else:
        codes = unpack(stored.payload, width, stored.bits)
        if stored.code == "codebook":
            levels = stored.levels[codes.int()]
        elif stored.code == "asymmetric":
            levels = codes.float()
        else:
            levels = {
                8: lambda: codes.view(torch.int8).float(),
                4: lambda: codes.float() - 8,
                3: lambda: 2 * codes.float() - 7,
                2: lambda: 2 * codes.float() - 3,
            }[stored.bits]()
        scales = stored.scales.float().repeat_interleave(width // stored.groups, dim=-1)
        zeros = 0
        if stored.code == "asymmetric":
            scales, zeros = scales.chunk(2, dim=-1)
        numbers = levels * scales + zeros
    rotation = codec.rotation()
    assert (rotation is not None) == (spec.scheme in ("hadamard", "turboquant"))
    read = numbers if rotation is None else numbers @ rotation.T
    torch.testing.assert_close(read, codec.decode(packed, torch.float32), rtol=1e-5, atol=1e-5)
