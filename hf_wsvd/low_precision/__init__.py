"""Weights and activations of few bits: formats, linear layers that compute with them, and the exchange of modules."""

from .activations import fake_quantized_activations, quantize_activations
from .weights import dequantize_weight, fake_quantized_weight, quantize_weight, weight_scales


__all__ = [
    "dequantize_weight",
    "fake_quantized_activations",
    "fake_quantized_weight",
    "quantize_activations",
    "quantize_weight",
    "weight_scales",
]
