"""How one layer's keys and values are kept: what a `CacheConfig` says of a layer, for the stores."""

from __future__ import annotations

from typing import NamedTuple


# What each scheme can be asked for.
SCHEME_BITS: dict[str, tuple[int, ...]] = {
    "bf16": (16,),
    "fp16": (16,),
    "fp8": (8,),
    "minmax": (8, 4, 3, 2),
    "hadamard": (8, 4, 3, 2),
    "turboquant": (4, 3, 2),
    "kivi": (4, 2),
}
GROUPED_SCHEMES = ("minmax", "hadamard", "kivi")
KIVI_GROUP_SIZE = 32
KIVI_RESIDUAL_LENGTH = 128
ALL_BITS = (16, 8, 4, 3, 2)


class StorageSpec(NamedTuple):
    """How the keys or the values of one layer are kept.

    Attributes:
        scheme: a key of `SCHEME_BITS`, or None for the model's own dtype.
        bits: of the payload; 16 for None.
        group_size: channels (KIVI keys: tokens) that share a scale; None: the whole head (KIVI: 32).
        symmetric: whether zero stands in the middle of the range.
        sink_length, residual_length: first and newest tokens that are kept in the model's dtype.
        whole_heads: heads that are kept in the model's dtype.
        text: how tokens that are not of images are kept; None: like all others. The other fields then say how tokens
            of images are kept, but for `whole_heads`, which holds for both.
        guards: heads that are kept in other forms, pairs of a spec and sorted heads; of tokens of images where `text`
            is given, which has its own.
        width: channels that are kept of each head but `wide_heads`, whose other channels are zero; None: all.
        wide_heads: heads that have numbers in all their channels.
    """

    scheme: str | None = None
    bits: int = 16
    group_size: int | None = None
    symmetric: bool = False
    sink_length: int = 0
    residual_length: int = 0
    whole_heads: tuple[int, ...] = ()
    text: StorageSpec | None = None
    guards: tuple[tuple[StorageSpec, tuple[int, ...]], ...] = ()
    width: int | None = None
    wide_heads: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all tokens keep the model's dtype."""
        return self.scheme is None and (self.text is None or self.text.whole)


class LayerStorage(NamedTuple):
    """How one layer is kept, and what the first tokens of an empty layer attend to ("exact" or "stored")."""

    key: StorageSpec = StorageSpec()
    value: StorageSpec = StorageSpec()
    prefill: str = "exact"

    @property
    def whole(self) -> bool:
        """Whether keys and values both keep the model's dtype."""
        return self.key.whole and self.value.whole

    @property
    def by_class(self) -> bool:
        """Whether tokens of images are kept otherwise than those of text."""
        return self.key.text is not None or self.value.text is not None


WHOLE_LAYER = LayerStorage()
