"""Rotary rows, and the search for what lies between a layer's latent and its cached key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .call import key_norm_module, key_norms
from .kernels import LatentHeads, Rotation, cached_key
from .quantizer_config import KeyLayout


def half_rows(rows: Tensor, rotation: str) -> Tensor:
    """One number an angle: `[B, S, d]` as models pass cos or sin to `[B, S, d/2]` (the other half repeats it)."""
    return rows[..., 0::2] if rotation == "interleaved" else rows[..., : rows.shape[-1] // 2]


def repeats_as(rows: Tensor, rotation: str) -> bool:
    """Whether the dropped half of `rows` is indeed the kept one."""
    half = half_rows(rows, rotation)
    other = rows[..., 1::2] if rotation == "interleaved" else rows[..., rows.shape[-1] // 2 :]
    return torch.equal(half, other)


def find_key_layout(
    attention: nn.Module, key: LatentHeads, rows: tuple[Tensor, Tensor] | None, seen: Tensor, tolerance: float = 2e-2
) -> KeyLayout | None:
    """The norm and rotation that turn `key` into the key `seen` by the cache; None if none does.

    Args:
        key: latents of some tokens at different positions, with their expansion.
        rows: cos and sin as the model passed them, `[B, S, d]`, or None.
        seen: `[B, H, S, D]`, what `Cache.update` received for the same tokens.
        tolerance: largest relative error of a match; well above rounding in bf16, well below a wrong rotation.
    """
    best, found = tolerance, None
    has_norm = key_norm_module(attention) is not None
    for norm in ("before", "before_by_token", "after") if has_norm else ("none",):
        for style in ("halves", "interleaved", "interleaved_halves", "none"):
            rotation = None
            if style != "none":
                if rows is None or not all(repeats_as(r, style) for r in rows):
                    continue
                rotation = Rotation(*(half_rows(r, style) for r in rows), interleaved=style != "halves")
            layout = KeyLayout(norm, style)
            try:
                error = relative_error(cached_key(key, rotation, **key_norms(attention, layout)), seen)
            except RuntimeError:  # shapes that do not fit: not this layout
                continue
            if error < best:
                best, found = error, layout
    return found


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of `b`; infinite for different shapes."""
    if a.shape != b.shape:
        return float("inf")
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()
