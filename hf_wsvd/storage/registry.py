"""Codecs by the name of their scheme."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..quantizer_config import StorageSpec
from .codec import Codec
from .float16 import CastCodec
from .fp8 import Fp8Codec
from .hadamard import HadamardCodec
from .minmax import MinMaxCodec
from .turboquant import TurboQuantCodec


Builder = Callable[[StorageSpec, int], Codec]

_BUILDERS: dict[str, Builder] = {
    "bf16": lambda spec, width: CastCodec(width, torch.bfloat16),
    "fp16": lambda spec, width: CastCodec(width, torch.float16),
    "fp8": lambda spec, width: Fp8Codec(width),
    "minmax": lambda spec, width: MinMaxCodec(width, spec.bits, spec.group_size, spec.symmetric),
    "hadamard": lambda spec, width: HadamardCodec(width, spec.bits, spec.group_size, spec.symmetric),
    "turboquant": lambda spec, width: TurboQuantCodec(width, spec.bits),
}


def register_codec(name: str, builder: Builder) -> None:
    """Have `make_codec` call `builder(spec, width)` for the scheme `name`, in place of an earlier one of the name."""
    _BUILDERS[name] = builder


def make_codec(spec: StorageSpec, width: int) -> Codec:
    """The codec of a layer's keys or values, `width` numbers a token and head.

    Raises:
        ValueError: a scheme that is no token-wise codec (None and "kivi" are none), a group_size that does not divide
            width.
    """
    if spec.scheme not in _BUILDERS:
        raise ValueError(f"scheme={spec.scheme!r} is not allowed; allowed: one of {tuple(_BUILDERS)}")
    return _BUILDERS[spec.scheme](spec, width)
