"""Eight-bit floats with one scale a head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.encoding import Encoding
from ..kernels.stored_tokens import StoredTokens
from .codec import Codec, Packed


LARGEST = 448.0  # of float8_e4m3fn


class Fp8Codec(Codec):
    """e4m3 floats (OCP 8-bit floating point, arXiv 2209.05433) over a scale a head.

    Payload `[B, H, N, width]` uint8 (the bits of float8_e4m3fn, which few operations of torch take), scales
    `[B, H, N, 0]`. `state["scale"] [1, H, 1, 1]` fp32 is 2 amax / 448 over the finite numbers of the first tokens that
    are encoded (1 where there is none but zero), and stays: a token never changes when others come. The factor 2 is
    room for later tokens, at no loss but the smallest numbers of a floating-point code.

    Larger numbers, infinities included, read as 448 scales; NaN reads as NaN, alone.
    """

    stateful: ClassVar[bool] = True

    def encode(self, tokens: Tensor) -> Packed:
        tokens = tokens.float()
        self.observe(tokens)
        scale = self.state.get("scale", 1)
        # Without the clamp, the cast gives NaN beyond the range on some devices and 448 on others.
        payload = (tokens / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        return Packed(payload, tokens.new_empty((*tokens.shape[:-1], 0), dtype=torch.float16))

    def observe(self, tokens: Tensor) -> None:
        if "scale" not in self.state and tokens.numel():
            tokens = tokens.float()
            finite = torch.where(tokens.isfinite(), tokens, 0).abs()
            scale = finite.amax(dim=(0, 2, 3), keepdim=True) / (LARGEST / 2)
            self.state["scale"] = torch.where(scale > 0, scale, 1)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        scale = self.state.get("scale")
        # A scale of fp16 would lose bits of small heads and overflow for large ones.
        values = packed.payload.view(torch.float8_e4m3fn).to(torch.float32 if dtype == torch.float16 else dtype)
        return (values if scale is None else values.mul_(scale.to(values.dtype))).to(dtype)

    def of_heads(self, heads: slice) -> Fp8Codec:
        new = Fp8Codec(self.width)
        new.state = {name: value[:, heads] for name, value in self.state.items()}
        return new

    def stored(self, packed: Packed) -> StoredTokens:
        return StoredTokens(packed.payload, None, self.width, "fp8", 8, self._head_scales())

    def encoding(self) -> Encoding:
        return Encoding("fp8", 8, self.width, head_scales=self._head_scales())

    def _head_scales(self) -> Tensor | None:
        scale = self.state.get("scale")
        return None if scale is None else scale.flatten()
