"""Cache layers: growth without concatenation, and layers that hold latents in place of keys and values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .call import active_call
from .token_buffer import TokenBuffer


class GrowingMixin:
    """Dynamic storage in `TokenBuffer`s: `keys` and `values` are views `[B, H, S, width]` of them."""

    key_buffer: TokenBuffer | None = None
    value_buffer: TokenBuffer | None = None

    @property
    def keys(self) -> Tensor | None:
        return None if self.key_buffer is None else self.key_buffer.view

    @keys.setter
    def keys(self, tokens: Tensor | None) -> None:
        self.key_buffer = None if tokens is None else TokenBuffer(tokens)

    @property
    def values(self) -> Tensor | None:
        return None if self.value_buffer is None else self.value_buffer.view

    @values.setter
    def values(self, tokens: Tensor | None) -> None:
        self.value_buffer = None if tokens is None else TokenBuffer(tokens)

    def reset(self) -> None:
        # Tokens are dropped, not zeroed: transformers before 5.18 zeroes, and the next prompt would follow the zeros.
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def offload(self) -> None:
        if self.is_initialized:
            self.key_buffer.to("cpu")
            self.value_buffer.to("cpu")

    def prefetch(self) -> None:
        if self.is_initialized and self.key_buffer.data.device != self.device:
            self.key_buffer.to(self.device)
            self.value_buffer.to(self.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_batch(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_batch(indices)

    def _select_batch(self, indices: Tensor) -> None:
        if self.get_seq_length() > 0:
            self.key_buffer.select_batch(indices)
            self.value_buffer.select_batch(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.key_buffer.repeat_batch(repeats)
            self.value_buffer.repeat_batch(repeats)


def check_crop(tokens_to_remove: int) -> int:
    """Number of tokens to drop. Raises ValueError for a positive argument, as transformers does since 5.20."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end"
        )
    return -tokens_to_remove


class GrowingLayer(GrowingMixin, DynamicLayer):
    """`DynamicLayer` without a concatenation a token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.key_buffer.append(key_states), self.value_buffer.append(value_states)

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(tokens_to_remove)
        if self.is_initialized:
            self.key_buffer.crop(count)
            self.value_buffer.crop(count)


class GrowingSlidingWindowLayer(GrowingMixin, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer` without a concatenation a token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys, values = self.key_buffer.append(key_states), self.value_buffer.append(value_states)
        if not self.record_past:
            self._keep_window()
            return keys, values
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def crop(self, tokens_to_remove: int) -> None:
        count = check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        beyond_window = self.cumulative_length >= self.sliding_window
        if beyond_window and not self.record_past:
            raise RuntimeError(
                "a sliding layer past its window can be cropped only after `activate_past_recording()`: "
                "the tokens that would come back into the window are gone"
            )
        self.key_buffer.crop(count)
        self.value_buffer.crop(count)
        self.cumulative_length = max(self.cumulative_length - count, 0)
        if beyond_window:
            self._keep_window()

    def _keep_window(self) -> None:
        self.key_buffer.keep_last(self.sliding_window - 1)
        self.value_buffer.keep_last(self.sliding_window - 1)


class LatentMixin:
    """A layer whose `keys` and `values` are latents `[B, H, S, rank]`.

    Rotary rows (cos and sin of every cached token) are held once for all layers that share them, in `rows`: a plain
    layer of the same kind with one head, so that every cache operation treats rows and latents alike. The layer with
    `owns_rows` passes the operations on.
    """

    # Shapes given ahead of the first tokens are those of dense heads; latents allocate when they arrive.
    supports_early_init = False
    rows_class: ClassVar[type[CacheLayerMixin]]
    rows: CacheLayerMixin | None = None
    rows_key: tuple | None = None
    owns_rows: bool = False
    # True until the first tokens arrive: then attention needs no token but those of the current call.
    is_empty: bool = True

    def new_rows(self) -> CacheLayerMixin:
        """A layer for rotary rows with this layer's limits and state."""
        limits = {n: getattr(self, n) for n in ("max_cache_len", "sliding_window") if hasattr(self, n)}
        if self.rows_class is StaticSlidingWindowLayer:  # its constructor takes the window, keeps only the minimum
            limits["sliding_window"] = self.max_cache_len
        rows = self.rows_class(**limits)
        if getattr(self, "record_past", False):
            rows.activate_past_recording()
        return rows

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store the latents of the current call; return what attention is to read.

        A first call, and a short one under the latent attention function, get `key_states` and `value_states` back;
        every other gets the expanded keys and values of the whole layer.
        """
        call = active_call()
        if call is None or call.layer is not self or call.key is None or call.value is None:
            raise RuntimeError(
                "this cache layer holds latents and can be updated only by the attention layer that it belongs to; "
                "use a new cache for another model"
            )
        empty, self.is_empty = self.is_empty, False
        if self.owns_rows:
            self._append_rows(call.cos, call.sin, key_states.shape[0])
        latents = super().update(call.key.latent, call.value.latent, *args, **kwargs)
        call.cache(*latents, self.rows.visible if self.rows is not None else None)
        whole = empty and (call.latent_attention or not self.is_compileable)
        if whole or call.reads_latents():
            call.handed = (key_states, value_states)
            return key_states, value_states
        return call.expand()

    def _append_rows(self, cos: Tensor, sin: Tensor, batch: int) -> None:
        """Rows arrive as `[B or 1, S, d/2]`; one row serves the batch until somebody brings more."""
        if self.is_compileable:  # fixed shapes, and no look at the length tensor
            cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        elif self.rows.is_initialized and self.rows.get_seq_length() > 0:
            held = self.rows.keys.shape[0]
            if held != cos.shape[0]:
                cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
                self.rows.batch_repeat_interleave(batch // held)
        cos, sin = self.rows.update(cos[:, None], sin[:, None])
        self.rows.visible = (cos[:, 0], sin[:, 0])

    def reset(self) -> None:
        super().reset()
        self.is_empty = True
        if self.owns_rows:
            self.rows.reset()
            self.rows.visible = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.owns_rows:
            self.rows.crop(tokens_to_remove)
        # At length zero transformers makes no mask and relies on `is_causal`, as for a first prompt.
        self.is_empty = self.is_empty or int(self.get_seq_length()) == 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self._owns_row_batch():
            self.rows.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._owns_row_batch():
            self.rows.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._owns_row_batch():
            self.rows.batch_repeat_interleave(repeats)

    def _owns_row_batch(self) -> bool:
        return self.owns_rows and self.rows.is_initialized and self.rows.keys.shape[0] > 1


class LatentDynamicLayer(LatentMixin, GrowingLayer):
    """Latents of full attention, growing with the text."""

    rows_class = GrowingLayer


class LatentSlidingWindowLayer(LatentMixin, GrowingSlidingWindowLayer):
    """Latents of the last `sliding_window` tokens."""

    rows_class = GrowingSlidingWindowLayer

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        if self.owns_rows:
            self.rows.activate_past_recording()


class LatentStaticLayer(LatentMixin, StaticLayer):
    """Latents in tensors of fixed size and address, for compiled decoding."""

    rows_class = StaticLayer


class LatentStaticSlidingWindowLayer(LatentMixin, StaticSlidingWindowLayer):
    """Latents of a sliding window in tensors of fixed size and address."""

    rows_class = StaticSlidingWindowLayer


LATENT_LAYERS: dict[type, type[LatentMixin]] = {
    DynamicLayer: LatentDynamicLayer,
    DynamicSlidingWindowLayer: LatentSlidingWindowLayer,
    StaticLayer: LatentStaticLayer,
    StaticSlidingWindowLayer: LatentStaticSlidingWindowLayer,
}
