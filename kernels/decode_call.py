"""What all parts of one attention call share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .latent_heads import Rotation
from .stored_tokens import DecodePart, KeyNormWeights


class DecodeCall(NamedTuple):
    """The arguments of `fused_attention` beside its parts, checked.

    Attributes:
        query: `[B, Hq, N, D]`, normalised and rotated.
        kv_heads: KV heads of the layer.
        tokens: places of the sequence, on the host: no token stands at this place or behind.
        scaling: factor of the scores.
        rotation: rotary rows by place, or None.
        mask: bool or additive, `[B or 1, Hq or 1, N or 1, tokens]`, or None.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask, or None.
        window: a query sees the last `window` places, its own included, or None.
        lengths: int32 `[B]` on the device, places in use of each sequence; None for `tokens`.
        starts: int32 `[B]` on the device, first place of each sequence to be seen; None for 0.
        norm: RMS norm over expanded keys, or None.
    """

    query: Tensor
    kv_heads: int
    tokens: int
    scaling: float
    rotation: Rotation | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    window: int | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    norm: KeyNormWeights | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.kv_heads


def part_heads(part: DecodePart) -> tuple[int, ...]:
    """The KV heads of the layer that `part` holds, in its order."""
    return tuple(range(part.key.payload.shape[1])) if part.heads is None else part.heads


def layer_heads(parts: Sequence[DecodePart]) -> int:
    """KV heads of the layer of which `parts` are all tokens."""
    return max([-1, *(head for part in parts for head in part_heads(part))]) + 1


def sequence_tokens(
    parts: Sequence[DecodePart], rotation: Rotation | None, mask: Tensor | None, lengths: Tensor | None
) -> int:
    """Places of the sequence, from shapes alone.

    Rows of a rotation and columns of a mask may be more than there are tokens (buffers of fixed size): without
    `places` the parts say where the sequence ends.

    Raises:
        ValueError: parts with `places` and nothing else to tell the length; a rotation or mask without such an axis.
    """
    if all(part.places is None for part in parts):
        return max(part.first + part.key.payload.shape[2] for part in parts)
    if rotation is not None:
        if rotation.cos.dim() != 3:
            raise ValueError(f"rotation.cos={list(rotation.cos.shape)} is not allowed; allowed: [1 or B, places, d/2]")
        return rotation.cos.shape[1]
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(f"mask={list(mask.shape)} is not allowed; allowed: [1 or B, 1 or Hq, 1 or N, places]")
        return mask.shape[-1]
    if lengths is not None:
        return 2**31 - 1
    raise ValueError("lengths is None; allowed with places, but without a rotation and a mask: int32 [B]")


def hidden_below(mask: Tensor) -> float:
    """An additive mask hides a token with this number or less: the lowest of its dtype, as models write it."""
    return torch.finfo(mask.dtype).min
