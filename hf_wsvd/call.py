"""One forward of one attention layer: the channel between its projections, its cache layer and its attention."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .kernels import LatentHeads, Rotation, cached_key
from .kernels.dispatch import MAX_QUERY_TOKENS, device_obstacle
from .long_query import needs_portions
from .quantizer_config import KeyLayout


if TYPE_CHECKING:
    from .cache_layers import StoredMixin
    from .latent_layers import LatentMixin

WSVD_FUNCTIONS = ("wsvd", "wsvd_eager")


class LatentCall:
    """What passes between the hooks around one `self_attn` forward whose cache layer holds latents.

    Opened before the forward and closed after it; never outlives it. A plain class, so that dynamo can trace it.
    """

    def __init__(self, attention: nn.Module, layout: KeyLayout, layer: LatentMixin, cos: Tensor, sin: Tensor):
        self.attention = attention
        self.layout = layout
        self.layer = layer
        self.cos, self.sin = cos, sin  # rows of the new tokens, [B or 1, N, d/2], or None
        self.key: LatentHeads | None = None  # of the new tokens; with the factors, so that offloading cannot part them
        self.value: LatentHeads | None = None
        self.stored = False  # whether the cache layer has the new tokens
        self.exact = False  # whether attention gets them as they are rather than as they were stored
        self.handed: tuple[Tensor, Tensor] | None = None  # what the cache gave attention instead of expanded keys
        self.layer_was_empty = layer.is_empty
        self.in_portions = False  # whether attention reads the layer a few heads at a time
        self.latent_attention = attention.config._attn_implementation in WSVD_FUNCTIONS
        self._cached: tuple[LatentHeads, LatentHeads, Rotation | None] | None = None

    def record(self, projection: nn.Module, heads: LatentHeads) -> None:
        """Take the latents of the new tokens from the layer's own `k_proj` or `v_proj`."""
        if projection is self.attention.k_proj:
            self.key = heads
        elif projection is self.attention.v_proj:
            self.value = heads

    def rotation(self) -> Rotation | None:
        """Rotary rows of all tokens that attention may see."""
        if self.layout.rotation == "none":
            return None
        return Rotation(*self.layer.rows.angles, interleaved=self.layout.rotation != "halves")

    def cached(self) -> tuple[LatentHeads, LatentHeads, Rotation | None]:
        """Latents of all tokens that attention may see, unpacked, and their rotary rows."""
        if self._cached is None:
            key, value = self.layer.visible(self.key.latent, self.value.latent, self.exact)
            rotation = self.rotation()
            if rotation is not None and rotation.cos.shape[1] > key.shape[-2]:  # a prompt alone, see the static layers
                rows = (rotation.cos[:, : key.shape[-2]], rotation.sin[:, : key.shape[-2]])
                rotation = rotation._replace(cos=rows[0], sin=rows[1])
            self._cached = (self.key._replace(latent=key), self.value._replace(latent=value), rotation)
        return self._cached

    def reads_latents(self) -> bool:
        """Whether attention works on the latents rather than on expanded keys and values."""
        return self.latent_attention and self.key.latent.shape[-2] <= MAX_QUERY_TOKENS

    def takes_portions(self) -> bool:
        """Whether attention reads the cache layer, which has the new tokens, a few heads at a time."""
        self.in_portions = self.latent_attention and needs_portions(self, self.key.latent)
        return self.in_portions

    def reads_layer(self) -> bool:
        """Whether attention reads the cache layer by itself, and was handed the new keys and values to tell so."""
        return self.stored and (self.in_portions or self.reads_latents())

    @property
    def batch(self) -> int:
        return self.key.latent.shape[0]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.key.latent.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of an expanded key."""
        return self.key.latent.shape[-1] if self.key.up is None else self.key.up.shape[1]

    @property
    def value_dim(self) -> int:
        """Channels of an expanded value."""
        return self.value.latent.shape[-1] if self.value.up is None else self.value.up.shape[1]

    @property
    def element_size(self) -> int:
        """Bytes of one of their numbers."""
        return self.key.latent.element_size()

    def read_heads(self, heads: slice, length: int) -> tuple[LatentHeads, LatentHeads]:
        """Latents of some heads, unpacked, of all tokens that a query of `length` tokens may see."""
        key, value = self.layer.visible_heads(heads, length)
        return heads_of(self.key, key, heads), heads_of(self.value, value, heads)

    def norm_needs_all_heads(self) -> bool:
        """Whether the key norm treats heads differently."""
        return self.layout.norm == "before_by_token"

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all cached tokens, `[B, H, S, D]`, as dense attention would have cached them."""
        key, value, rotation = self.cached()
        return cached_key(key, rotation, **self.key_norms()), value.expand()

    def key_norms(self) -> dict[str, nn.Module | None]:
        """The model's key norm as `norm_before`/`norm_after` of the attention functions."""
        return key_norms(self.attention, self.layout)


class DenseCall:
    """The same for a layer whose cache holds keys and values, packed, and whose attention can read them as they are.

    Attributes:
        always: hand packed tokens over even where no kernel is there to read them (in a trial).
    """

    def __init__(self, attention: nn.Module, layer: StoredMixin, always: bool = False):
        self.attention, self.layer, self.always = attention, layer, always
        self.layer_was_empty = not layer.has_any()
        self.key = self.value = LatentHeads(None)
        self.handed: tuple[Tensor, Tensor] | None = None
        self.in_portions = False  # whether attention reads the layer a few heads at a time
        self.packed = False  # whether the layer, and not `handed`, has what attention is to read

    def record(self, projection: nn.Module, heads: LatentHeads) -> None:
        """The cache holds the expanded heads."""

    def rotation(self) -> None:
        """Keys were rotated before they came to the cache."""
        return

    def reads_layer(self) -> bool:
        """Whether attention reads the cache layer by itself, and was handed the new keys and values to tell so."""
        return self.packed

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all cached tokens, unpacked."""
        return self.layer.visible(*self.handed, exact=False)

    @property
    def batch(self) -> int:
        return self.handed[0].shape[0]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.handed[0].shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.handed[0].shape[-1]

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.handed[1].shape[-1]

    @property
    def element_size(self) -> int:
        """Bytes of one of their numbers."""
        return self.handed[0].element_size()

    def read_heads(self, heads: slice, length: int) -> tuple[LatentHeads, LatentHeads]:
        """Keys and values of some heads, unpacked, of all tokens that a query of `length` tokens may see."""
        key, value = self.layer.visible_heads(heads, length)
        return LatentHeads(key), LatentHeads(value)

    def key_norms(self) -> dict[str, nn.Module | None]:
        """Keys were normalised before they came to the cache."""
        return {}

    def norm_needs_all_heads(self) -> bool:
        return False

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether attention will read the cache layer by itself; then it gets the new keys and values to tell so."""
        if self.attention.config._attn_implementation not in WSVD_FUNCTIONS:
            return False
        before, self.handed = self.handed, (keys, values)
        whole = self.layer.storage.whole
        self.in_portions = not whole and needs_portions(self, keys)
        if keys.shape[-2] <= MAX_QUERY_TOKENS and not self.layer_was_empty:  # else no mask says what the tokens see
            gradients = torch.is_grad_enabled() and keys.requires_grad
            kernel = not (whole or gradients or device_obstacle(keys.device) or self.layer.obstacle())
            self.packed = kernel or self.always
        self.packed = self.packed or self.in_portions
        if not self.packed:
            self.handed = before
        return self.packed


def heads_of(all_heads: LatentHeads, latent: Tensor, heads: slice) -> LatentHeads:
    """Latents of some heads with what expands them, given what expands those of all."""
    up, bias = (None if side is None else side[heads] for side in (all_heads.up, all_heads.bias))
    return LatentHeads(latent, up, bias)


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

    call: LatentCall | DenseCall | None = None


_traced = _Slot()
_local = threading.local()


def active_call() -> LatentCall | DenseCall | None:
    """The call that is open in this thread, if any."""
    if torch.compiler.is_compiling():
        return _traced.call
    return getattr(_local, "call", None)


def set_active_call(call: LatentCall | DenseCall | None) -> None:
    """Open `call` in this thread, or close the open one with None."""
    if torch.compiler.is_compiling():
        _traced.call = call
    else:
        _local.call = call
