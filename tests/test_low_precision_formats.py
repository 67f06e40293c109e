"""Rounding to 8 and 4 bits, and products with what was rounded, against fp64 products of the same operands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_wsvd import LowPrecisionConfig
from hf_wsvd.low_precision import (
    dequantize_weight,
    fake_quantized_activations,
    fake_quantized_weight,
    quantize_activations,
    quantize_weight,
    weight_scales,
)
from hf_wsvd.low_precision.latent import QuantizedLatentProjection
from hf_wsvd.low_precision.linear import QuantizedLinear
from hf_wsvd.low_precision.product import integer_obstacle
from hf_wsvd.low_precision.weights import group_size_of, weight_codes
from hf_wsvd.modules import LatentProjection


IN, OUT = 48, 20
BITS_AND_GROUPS = [(8, None), (8, 16), (4, None), (4, 16)]
# Weight bits, activation bits, group size: every path of the product.
PRODUCTS = [(8, 8, None), (8, 4, None), (4, 8, None), (4, 4, None), (8, 8, 16), (4, 8, 16), (8, 16, None), (4, 16, 16)]


# Weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group_size"), BITS_AND_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_errs_by_half_a_step_and_fake_rounding_agrees_to_the_last_bit(bits, group_size, dtype):
    weight = torch.randn(OUT, IN).to(dtype)
    stored, scales = quantize_weight(weight, bits, group_size)
    exact = dequantize_weight(stored, scales, bits, IN)
    groups = (exact - weight.float()).unflatten(1, (scales.shape[1], -1))
    assert (groups.abs() <= 0.5001 * scales[..., None]).all()
    assert torch.equal(fake_quantized_weight(weight, bits, group_size), exact.to(dtype))
    assert stored.nbytes == OUT * IN * bits // 8
    assert scales.shape == (OUT, 1 if group_size is None else IN // group_size)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_range_is_symmetric_and_used_to_its_end(bits):
    weight = torch.randn(OUT, IN)
    stored, scales = quantize_weight(weight, bits)
    codes = weight_codes(stored, bits, IN)
    limit = 2 ** (bits - 1) - 1
    assert codes.min() >= -limit
    assert (codes.abs().amax(1) == limit).all()
    opposite, same = quantize_weight(-weight, bits)
    assert torch.equal(weight_codes(opposite, bits, IN), -codes)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_constants_are_exact(bits):
    weight = torch.zeros(3, IN)
    weight[1], weight[2] = 0.25, -3.0
    assert torch.equal(dequantize_weight(*quantize_weight(weight, bits), bits, IN)[0], weight[0])
    torch.testing.assert_close(dequantize_weight(*quantize_weight(weight, bits), bits, IN), weight, rtol=1e-6, atol=0)


def test_an_odd_number_of_inputs_is_packed_too():
    weight = torch.randn(OUT, 7)
    stored, scales = quantize_weight(weight, 4)
    assert stored.shape == (OUT, 4)
    assert torch.equal(dequantize_weight(stored, scales, 4, 7), fake_quantized_weight(weight, 4))


def test_groups_by_default():
    assert [group_size_of(size, 4, None) for size in (4096, 576, 96, 48)] == [128, 64, 32, 48]
    assert group_size_of(4096, 8, None) == 4096
    with pytest.raises(ValueError, match=r"group_size=32 is not allowed; allowed: a divisor of 48"):
        group_size_of(48, 4, 32)
    with pytest.raises(ValueError, match=r"bits=3 is not allowed; allowed: one of \(8, 4\)"):
        quantize_weight(torch.zeros(2, 2), 3)


def test_given_scales_cut_codes_and_get_gradients_that_match_finite_differences():
    weight = torch.randn(OUT, IN, requires_grad=True)
    scales = (weight_scales(weight, 4, 16) * 0.5).requires_grad_()
    rounded = fake_quantized_weight(weight, 4, scales=scales)
    assert torch.equal(rounded, dequantize_weight(*quantize_weight(weight, 4, scales=scales), 4, IN))
    cut = (weight.unflatten(1, (3, -1)).abs() > 7.5 * scales[..., None]).flatten(1)
    assert 0 < cut.sum() < cut.numel() / 2
    rounded.backward(torch.ones_like(rounded))
    assert torch.equal(weight.grad, (~cut).float())
    # Of a group whose codes are all cut the value is 7 times its scale: there rounding has a derivative.
    big, scale = torch.full((1, 4), 9.0), torch.tensor([[1.0]], requires_grad=True)
    fake_quantized_weight(big, 4, scales=scale).sum().backward()
    assert scale.grad.item() == 4 * 7


# Activations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_every_token_has_a_scale_of_its_own(bits):
    x = torch.randn(2, 5, IN) * torch.logspace(-6, 6, 5)[:, None]
    codes, scales = quantize_activations(x, bits)
    assert (codes.dtype, scales.shape) == (torch.int8, (2, 5, 1))
    assert (codes.abs().amax(-1) == 2 ** (bits - 1) - 1).all()
    assert ((codes * scales - x).abs() <= 0.5001 * scales).all()
    assert torch.equal(fake_quantized_activations(x, bits), codes * scales)


def test_zeros_give_zeros_and_what_is_not_finite_shows():
    x = torch.randn(4, IN)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    rounded = fake_quantized_activations(x, 8)
    assert (rounded[0] == 0).all()
    assert not torch.isfinite(rounded[1:3]).any(-1).any()
    assert torch.isfinite(rounded[3]).all()


# Products -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_bits", "activation_bits", "group_size"), PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quantized_linear_is_the_product_of_its_rounded_operands(weight_bits, activation_bits, group_size, dtype):
    linear = nn.Linear(IN, OUT).to(dtype)
    config = LowPrecisionConfig(weight_bits, activation_bits, group_size, method="rtn")
    layer = QuantizedLinear.from_linear(linear, config)
    x = torch.randn(2, 3, IN, dtype=dtype)
    x[0, 0] = 0
    weight = fake_quantized_weight(linear.weight.detach().float(), weight_bits, group_size)
    rounded = fake_quantized_activations(x.float(), activation_bits)
    exact = rounded.double() @ weight.double().T + linear.bias.double()
    y = layer(x)
    assert y.dtype == dtype
    # Half precision rounds a dequantized weight, and the result.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (y.double() - exact).norm() <= tolerance * exact.norm()


def test_integer_products_lose_nothing_to_the_order_of_their_sums():
    linear = nn.Linear(1024, 8, bias=False)
    layer = QuantizedLinear.from_linear(linear, LowPrecisionConfig(method="rtn"))
    x = torch.randn(5, 1024)
    order = torch.randperm(1024)
    moved = QuantizedLinear.from_linear(linear, LowPrecisionConfig(method="rtn"))
    moved.weight.data = layer.weight.data[..., order]
    assert torch.equal(layer(x), moved(x[:, order]))


def test_what_has_no_integer_product_is_named():
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    assert integer_obstacle(cpu, 7, 3, 1) is None
    assert "scales of their own" in integer_obstacle(cpu, 64, 64, 2)
    assert "multiples of 8" in integer_obstacle(cuda, 60, 64, 1)
    assert "mps" in integer_obstacle(other, 64, 64, 1)


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (2, 0, IN), (1, 1, 1, IN)])
def test_inputs_of_any_shape(shape):
    layer = QuantizedLinear.from_linear(nn.Linear(IN, OUT), LowPrecisionConfig(method="rtn"))
    assert layer(torch.randn(shape)).shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("form", [(8, 8, None), (4, 16, 16), (4, 8, 16)])
def test_gradients_reach_the_inputs_through_the_dequantized_weight_and_codes_stay(form):
    layer = QuantizedLinear.from_linear(nn.Linear(IN, OUT), LowPrecisionConfig(*form, method="rtn"))
    x, grad = torch.randn(3, IN, requires_grad=True), torch.randn(3, OUT)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantized_weight())
    assert layer.weight.grad is None
    assert layer.weight_scales.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("full_heads", [(), (1,)])
def test_a_quantized_projection_gives_latents_of_its_rounded_down_factor(bits, full_heads):
    heads, head_dim, rank = 3, 8, 5
    projection = LatentProjection(IN, heads, head_dim, rank, bias=True, full_heads=full_heads)
    for parameter in projection.parameters():
        nn.init.normal_(parameter)
    layer = QuantizedLatentProjection(projection, LowPrecisionConfig(bits, 16, method="rtn"))
    plain = layer.dequantized()
    assert torch.equal(plain.weight, fake_quantized_weight(projection.weight.detach(), bits))
    x = torch.randn(2, 4, IN)
    torch.testing.assert_close(layer.latents(x), plain.latents(x))
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.merged()(x), plain(x), rtol=1e-4, atol=1e-4)
    assert layer.up is projection.up


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float64), lambda m: m.type(torch.half)]
)
def test_casts_leave_codes_and_scales_as_they_are(cast):
    layer = QuantizedLinear.from_linear(nn.Linear(IN, OUT), LowPrecisionConfig(method="rtn"))
    before = layer.weight.clone(), layer.weight_scales.clone()
    cast(layer)
    assert layer.weight.dtype == torch.int8
    assert torch.equal(layer.weight, before[0])
    assert layer.weight_scales.dtype == torch.float32
    assert torch.equal(layer.weight_scales, before[1])
