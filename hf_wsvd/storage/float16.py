"""Tokens in another 16-bit floating dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.stored_tokens import StoredTokens
from .codec import Codec, Packed


class CastCodec(Codec):
    """A cast: payload `[B, H, N, width]` in `dtype` (bf16 or fp16), no scales.

    Finite numbers beyond the range read as the largest one of the dtype; NaN and infinities read as themselves.
    Tokens of that dtype are not copied, either way.
    """

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__(width)
        self.dtype = dtype

    def encode(self, tokens: Tensor) -> Packed:
        scales = tokens.new_empty((*tokens.shape[:-1], 0), dtype=torch.float16)
        if tokens.dtype != self.dtype:
            largest = torch.finfo(self.dtype).max
            tokens = tokens.float()  # the largest number of one 16-bit dtype is none of the other
            tokens = torch.where(tokens.isinf(), tokens, tokens.clamp(-largest, largest)).to(self.dtype)
        return Packed(tokens, scales)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return packed.payload.to(dtype)

    def stored(self, packed: Packed) -> StoredTokens:
        return StoredTokens(packed.payload, None, self.width)
