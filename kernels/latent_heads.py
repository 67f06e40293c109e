"""The operands of attention over latents, and their expansion to ordinary keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


KeyNorm = Callable[[Tensor], Tensor]


class LatentHeads(NamedTuple):
    """Per-head latents and what expands them.

    Attributes:
        latent: `[B, H, S, r]`.
        up: `[H, D, r]`, or None when the latent is the head itself (`r == D`).
        bias: `[H, D]` or None, added after expansion.
    """

    latent: Tensor
    up: Tensor | None = None
    bias: Tensor | None = None

    def expand(self) -> Tensor:
        """`up @ latent + bias`: `[B, H, S, D]`."""
        full = self.latent if self.up is None else self.latent @ self.up.transpose(1, 2)
        return full if self.bias is None else full + self.bias[:, None]


class Rotation(NamedTuple):
    """Rotary rows of the cached tokens, one angle a pair.

    Attributes:
        cos, sin: `[B or 1, S, d/2]`, d at most the head's dimension (the tail is not rotated).
        interleaved: pair i is elements (2i, 2i+1) if true, else (i, i + d/2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First and second elements of every pair, and the unrotated tail, along the last axis of `x`."""
        half = self.cos.shape[-1]
        turned, tail = x[..., : 2 * half], x[..., 2 * half :]
        if self.interleaved:
            return turned[..., 0::2], turned[..., 1::2], tail
        return turned[..., :half], turned[..., half:], tail

    def apply(self, x: Tensor) -> Tensor:
        """Rotate `x [B, H, S, D]`."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        first, second, tail = self.split(x)
        first, second = first * cos - second * sin, second * cos + first * sin
        if self.interleaved:
            return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), tail], dim=-1)
        return torch.cat([first, second, tail], dim=-1)


def cached_key(
    key: LatentHeads,
    rotation: Rotation | None,
    norm_before: KeyNorm | None = None,
    norm_after: KeyNorm | None = None,
) -> Tensor:
    """The key that dense attention would have cached: expand, normalise, rotate. `[B, H, S, D]`.

    `norm_before` and `norm_after` act on `[B, H, S, D]` before and after the rotation.
    """
    full = key.expand()
    if norm_before is not None:
        full = norm_before(full)
    if rotation is not None:
        full = rotation.apply(full)
    return full if norm_after is None else norm_after(full)
