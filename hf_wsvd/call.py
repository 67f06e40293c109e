"""One forward of one attention layer: the channel between its projections, its cache layer and its attention."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .kernels import LatentHeads, Rotation, cached_key
from .quantizer_config import KeyLayout


if TYPE_CHECKING:
    from .latent_layers import LatentMixin

# Longer queries expand K and V once instead: from here on the expansion is cheaper than attention in latent space.
MAX_LATENT_QUERY = 16


class LatentCall:
    """What passes between the hooks around one `self_attn` forward.

    Opened before the forward and closed after it; never outlives it. A plain class, so that dynamo can trace it.
    """

    def __init__(self, attention: nn.Module, layout: KeyLayout, layer: LatentMixin, cos: Tensor, sin: Tensor):
        self.attention = attention
        self.layout = layout
        self.layer = layer
        self.cos, self.sin = cos, sin  # rows of the new tokens, [B or 1, N, d/2], or None
        self.key: LatentHeads | None = None  # of the new tokens; with the factors, so that offloading cannot part them
        self.value: LatentHeads | None = None
        self.cached: tuple[LatentHeads, LatentHeads, Rotation | None] | None = None  # of all tokens
        self.handed: tuple[Tensor, Tensor] | None = None  # what the cache gave attention instead of expanded keys
        self.layer_was_empty = layer.is_empty
        self.latent_attention = attention.config._attn_implementation in ("wsvd", "wsvd_eager")

    def record(self, projection: nn.Module, heads: LatentHeads) -> None:
        """Take the latents of the new tokens from the layer's own `k_proj` or `v_proj`."""
        if projection is self.attention.k_proj:
            self.key = heads
        elif projection is self.attention.v_proj:
            self.value = heads

    def cache(self, key_latent: Tensor, value_latent: Tensor, rows: tuple[Tensor, Tensor] | None) -> None:
        """Take the latents (and rotary rows) of all tokens that attention may see."""
        rotation = None
        if self.layout.rotation != "none":
            rotation = Rotation(*rows, interleaved=self.layout.rotation != "halves")
        self.cached = (self.key._replace(latent=key_latent), self.value._replace(latent=value_latent), rotation)

    def reads_latents(self) -> bool:
        """Whether attention works on the latents rather than on expanded keys and values."""
        return self.latent_attention and self.key.latent.shape[-2] <= MAX_LATENT_QUERY

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all cached tokens, `[B, H, S, D]`, as dense attention would have cached them."""
        key, value, rotation = self.cached
        return cached_key(key, rotation, **self.key_norms()), value.expand()

    def key_norms(self) -> dict[str, nn.Module | None]:
        """The model's key norm as `norm_before`/`norm_after` of the attention functions."""
        return key_norms(self.attention, self.layout)


KEY_NORM_NAMES = ("k_norm", "key_layernorm", "k_layernorm")


def key_norm_module(attention: nn.Module) -> nn.Module | None:
    """The layer's key norm, under whichever of its usual names."""
    return next((m for m in (getattr(attention, name, None) for name in KEY_NORM_NAMES) if m is not None), None)


def key_norms(attention: nn.Module, layout: KeyLayout) -> dict:
    """Keyword arguments of the attention functions that apply the key norm where `layout` has it."""
    norm = key_norm_module(attention)
    if layout.norm == "before":
        return {"norm_before": norm}
    if layout.norm == "before_by_token":
        return {"norm_before": lambda key: norm(key.transpose(1, 2)).transpose(1, 2)}
    return {"norm_after": norm} if layout.norm == "after" else {}


class _Slot:
    """Holds the open call while dynamo traces (it cannot write thread-local attributes; tracing takes a lock)."""

    call: LatentCall | None = None


_traced = _Slot()
_local = threading.local()


def active_call() -> LatentCall | None:
    """The call that is open in this thread, if any."""
    if torch.compiler.is_compiling():
        return _traced.call
    return getattr(_local, "call", None)


def set_active_call(call: LatentCall | None) -> None:
    """Open `call` in this thread, or close the open one with None."""
    if torch.compiler.is_compiling():
        _traced.call = call
    else:
        _local.call = call
