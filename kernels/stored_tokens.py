"""Tokens in the form in which a cache keeps them, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StoredTokens(NamedTuple):
    """One contiguous run of cached tokens of some heads, still packed.

    A number reads as `scale * level + zero`: `level` is what its code stands for, `scale` and `zero` come from
    `scales` by groups of channels. A rotation that a scheme applies before coding is not undone here: it belongs into
    what expands the tokens (`up @ rotation` in place of `up`).

    Attributes:
        payload: `[B, H, S, width]` in a 16- or 32-bit floating dtype, or `[B, H, S, bytes]` uint8 with codes in the
            planes of `kernels.packing`. Any strides with the last axis contiguous.
        scales: `[B, H, S, G]` float16; for code "asymmetric" `[B, H, S, 2 G]`, scales and then zeros. None for none.
        width: numbers a token and head.
        code: "float" (the payload itself), "fp8" (bits of float8_e4m3fn), "symmetric", "asymmetric" or "codebook".
        bits: of a code; 16 or 32 for "float".
        head_scales: fp32 `[H]`, factor of all numbers of a head ("fp8"), or None for 1.
        levels: fp32 `[2^bits]`, what each code stands for ("codebook"), or None.
    """

    payload: Tensor
    scales: Tensor | None
    width: int
    code: str = "float"
    bits: int = 16
    head_scales: Tensor | None = None
    levels: Tensor | None = None

    @property
    def groups(self) -> int:
        """Groups of channels with scales of their own; 0 without scales."""
        if self.scales is None:
            return 0
        return self.scales.shape[-1] // (2 if self.code == "asymmetric" else 1)


class DecodePart(NamedTuple):
    """Tokens of some heads that lie in one run, with what expands them.

    Attributes:
        key, value: `[B, H, S, ...]` each, the same heads and tokens in the same order.
        key_up, value_up: `[H, D, width]` or None where the tokens are the heads themselves.
        key_bias, value_bias: `[H, D]` or None, added after expansion.
        heads: the KV heads of the layer that these are, in order; None for all.
        places: int32 `[B or 1, S]`, where in the sequence each token stands (for rotary rows and the mask), -1 for a
            slot without a token; None where slot s is token `first + s`.
        first: see `places`.
    """

    key: StoredTokens
    value: StoredTokens
    key_up: Tensor | None = None
    value_up: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    heads: tuple[int, ...] | None = None
    places: Tensor | None = None
    first: int = 0


class KeyNormWeights(NamedTuple):
    """An RMS norm over each expanded key head.

    Attributes:
        weight: `[D]`, the factor of each channel (one more where a model keeps it around zero).
        epsilon: added to the mean square.
        before: whether it comes before the rotation.
    """

    weight: Tensor
    epsilon: float
    before: bool = True
