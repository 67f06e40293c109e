"""Coding and reading of tokens by kernels where these run, by torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.append import encode_tokens
from ..kernels.append_checks import FLOATS
from ..kernels.dequantize import dequantize
from ..kernels.dispatch import torch_preferred
from ..kernels.triton_support import runs_on
from .codec import Codec, Packed


def has_kernels(codec: Codec, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels code tokens of that dtype on that device as the codec does, and may; `Codec.to` came before."""
    allowed = runs_on(device) and not torch_preferred()
    return allowed and dtype in FLOATS and codec.encoding() is not None


def encode(codec: Codec, tokens: Tensor) -> Packed:
    """`codec.encode(tokens)`, in one launch where that can be."""
    if not has_kernels(codec, tokens.device, tokens.dtype):
        return codec.encode(tokens)
    codec.observe(tokens)
    return Packed(*encode_tokens(tokens, codec.encoding()))


def decode(codec: Codec, packed: Packed, dtype: torch.dtype) -> Tensor:
    """`codec.decode(packed, dtype)`. Kernels round once, to `dtype`; codecs may compute in it."""
    if not has_kernels(codec, packed.payload.device, dtype):
        return codec.decode(packed, dtype)
    return dequantize(codec.stored(packed), dtype, codec.constants.get("rotation"))


def decode_into(codec: Codec, packed: Packed, out: Tensor) -> None:
    """The same, written into `out`."""
    if has_kernels(codec, out.device, out.dtype) and out.stride(-1) == 1:
        dequantize(codec.stored(packed), None, codec.constants.get("rotation"), out)
    else:
        codec.decode_into(packed, out)
