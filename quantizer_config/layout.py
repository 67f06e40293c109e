"""What lies between a latent and the key that attention sees: the key norm and the rotation."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import fail


NORMS = ("none", "before", "before_by_token", "after")
ROTATIONS = ("none", "halves", "interleaved", "interleaved_halves")


@dataclass(frozen=True)
class KeyLayout:
    """How a model turns `k_proj(x)` into a cached key.

    Attributes:
        norm: `"none"`; `"before"`: the key norm precedes the rotation and sees `[B, H, S, D]`; `"before_by_token"`:
            the same on `[B, S, H, D]` (a weight of shape `[H, D]`, as in Cohere); `"after"`: it follows the rotation.
        rotation: `"none"`; `"halves"`: element i turns with i + d/2 (Llama) and the cos/sin rows repeat as two halves;
            `"interleaved"`: neighbours turn together and the rows repeat element-wise (Cohere);
            `"interleaved_halves"`: neighbours turn together and the rows repeat as two halves (GLM).
    """

    norm: str = "none"
    rotation: str = "none"

    def __str__(self) -> str:
        return f"{self.norm}:{self.rotation}"

    @classmethod
    def parse(cls, text: str | None) -> KeyLayout | None:
        """`"norm:rotation"` as stored in config.json; None stays None.

        Raises:
            ValueError: if the text names no known layout.
        """
        if text is None:
            return None
        norm, _, rotation = text.partition(":") if isinstance(text, str) else ("", "", "")
        if norm not in NORMS or rotation not in ROTATIONS:
            fail("key_layout", text, f"'NORM:ROTATION' with NORM in {NORMS} and ROTATION in {ROTATIONS}, or None")
        return cls(norm, rotation)
