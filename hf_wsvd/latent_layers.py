"""Cache layers that hold latents in place of keys and values, and the rotary rows beside them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .cache_layers import (
    GrowingLayer,
    GrowingSlidingWindowLayer,
    StoredMixin,
)
from .call import LatentCall, active_call
from .kernels import StoredTokens
from .quantizer_config import WHOLE_LAYER
from .static_layers import PackedStaticLayer, PackedStaticSlidingWindowLayer
from .storage.runs import Run
from .storage.static_window import StaticWindowLayer


class LatentMixin:
    """A layer whose `keys` and `values` are latents `[B, H, S, rank]`.

    Rotary rows (cos and sin of every cached token) are held once for all layers that share them, in `rows`: a plain
    layer of the same kind with one head, so that every cache operation treats rows and latents alike. The layer with
    `owns_rows` passes the operations on.
    """

    # Shapes given ahead of the first tokens are those of dense heads; latents allocate when they arrive.
    supports_early_init = False
    rows_class: ClassVar[type[CacheLayerMixin]]
    masks_prompt_alone: bool = False
    rows: CacheLayerMixin | None = None
    rows_key: tuple | None = None
    owns_rows: bool = False
    # True until the first tokens arrive: then attention needs no token but those of the current call.
    is_empty: bool = True

    def new_rows(self) -> CacheLayerMixin:
        """A layer for rotary rows with this layer's limits and state."""
        limits = {n: getattr(self, n) for n in ("max_cache_len", "sliding_window") if hasattr(self, n)}
        if self.rows_class is StaticWindowLayer:  # its constructor takes the window, keeps only the minimum
            limits["sliding_window"] = self.max_cache_len
        rows = self.rows_class(**limits)
        if getattr(self, "record_past", False):
            rows.activate_past_recording()
        return rows

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store the latents of the current call; return what attention is to read.

        A first call, and one under the latent attention function that is short or has too much to read at once, get
        `key_states` and `value_states` back; every other gets the expanded keys and values of the whole layer.
        """
        call = active_call()
        if not isinstance(call, LatentCall) or call.layer is not self or call.key is None or call.value is None:
            raise RuntimeError(
                "this cache layer holds latents and can be updated only by the attention layer that it belongs to; "
                "use a new cache for another model"
            )
        empty, self.is_empty = self.is_empty, False
        if self.owns_rows:
            self._append_rows(call.cos, call.sin, key_states.shape[0])
        call.exact, call.stored = self.append(call.key.latent, call.value.latent), True
        storage = getattr(self, "storage", WHOLE_LAYER)
        # As stored, without a mask at this point: attention in latent space could not be causal.
        as_stored = empty and not storage.whole and storage.prefill == "stored"
        whole = empty and (call.latent_attention or not self.is_compileable or self.masks_prompt_alone)
        if (not as_stored and (whole or call.reads_latents())) or call.takes_portions():
            call.handed = (key_states, value_states)
            return key_states, value_states
        expanded = call.expand()
        self.settle()
        return expanded

    def _append_rows(self, cos: Tensor, sin: Tensor, batch: int) -> None:
        """Rows arrive as `[B or 1, S, d/2]`; one row serves the batch until somebody brings more."""
        if self.is_compileable:  # fixed shapes, and no look at the length tensor
            cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        elif self.rows.is_initialized and self.rows.get_seq_length() > 0:
            held = row_batch(self.rows)
            if held != cos.shape[0]:
                cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
                self.rows.batch_repeat_interleave(batch // held)
        cos, sin = self.rows.update(cos[:, None], sin[:, None])
        self.rows.angles = (cos[:, 0], sin[:, 0])

    def reset(self) -> None:
        super().reset()
        self.is_empty = True
        # The model's weights may be others for the next text; those of a graph stay where they are.
        self.expansions, self.held_expansions = None, self.expansions or self.held_expansions
        if self.owns_rows:
            self.rows.reset()
            self.rows.angles = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.owns_rows:
            self.rows.crop(tokens_to_remove)
            self.rows.angles = None
        # At length zero transformers makes no mask and relies on `is_causal`, as for a first prompt.
        self.is_empty = self.is_empty or int(self.get_seq_length()) == 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self._owns_row_batch():
            self.rows.reorder_cache(beam_idx)
            self.rows.angles = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._owns_row_batch():
            self.rows.batch_select_indices(indices)
            self.rows.angles = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._owns_row_batch():
            self.rows.batch_repeat_interleave(repeats)
            self.rows.angles = None

    def _owns_row_batch(self) -> bool:
        return self.owns_rows and self.rows.is_initialized and row_batch(self.rows) > 1


def row_batch(rows: CacheLayerMixin) -> int:
    """Sequences that rotary rows are held for: 1 where all share them."""
    return rows.key_store.batch if isinstance(rows, StoredMixin) else rows.keys.shape[0]


class WholeStaticMixin:
    """What `StoredMixin` offers, for a static layer of transformers."""

    seen: tuple[Tensor, Tensor] | None = None
    expansions: dict | None = None
    held_expansions: dict | None = None
    masks_prompt_alone = False

    def append(self, key_states: Tensor, value_states: Tensor) -> bool:
        self.seen = self.stock_class.update(self, key_states, value_states)
        return False

    def visible(self, key_states: Tensor, value_states: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        return self.seen

    def visible_heads(self, heads: slice, query_length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.seen
        return keys[:, heads], values[:, heads]

    def visible_tokens(self, query_length: int) -> int:
        return self.seen[0].shape[-2]

    def obstacle(self) -> None:
        return None

    def runs(self, query_length: int) -> tuple[list[Run], list[Run]]:
        keys, values = (
            [Run.of(StoredTokens(tokens, None, tokens.shape[-1], bits=8 * tokens.element_size()))]
            for tokens in self.seen
        )
        return keys, values

    def lengths(self) -> Tensor:
        length = self.cumulative_length.clamp(max=self.seen[0].shape[-2])
        return length.to(torch.int32).repeat(self.batch_size)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        return (query_length, 0) if self.masks_prompt_alone and self.is_empty else super().get_mask_sizes(query_length)

    def settle(self) -> None:
        self.seen = None


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


class LatentStaticLayer(LatentMixin, WholeStaticMixin, StaticLayer):
    """Latents in tensors of fixed size and address, for compiled decoding."""

    rows_class = stock_class = StaticLayer


class LatentStaticSlidingWindowLayer(LatentMixin, WholeStaticMixin, StaticWindowLayer):
    """Latents of a sliding window in tensors of fixed size and address."""

    rows_class = stock_class = StaticWindowLayer


class LatentPackedStaticLayer(LatentMixin, PackedStaticLayer):
    """Packed latents in tensors of fixed size and address."""

    rows_class = StaticLayer


class LatentPackedStaticSlidingWindowLayer(LatentMixin, PackedStaticSlidingWindowLayer):
    """Packed latents of a sliding window in tensors of fixed size and address."""

    rows_class = StaticWindowLayer
