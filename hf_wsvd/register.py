"""Registration with transformers."""

from __future__ import annotations

from transformers.quantizers import auto


def register_quantization(config_class: type, quantizer_class: type) -> None:
    """Register quant_method "wsvd". Classes of an earlier import (notebook reload) are replaced."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop("wsvd", None)
    auto.AUTO_QUANTIZER_MAPPING.pop("wsvd", None)
    auto.register_quantization_config("wsvd")(config_class)
    auto.register_quantizer("wsvd")(quantizer_class)
    # The configurations that are asked when one is passed for a checkpoint that is quantized already.
    others = [kind for kind in auto.LOADING_ATTRIBUTES_CONFIG_TYPES if kind.__name__ != config_class.__name__]
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*others, config_class)
