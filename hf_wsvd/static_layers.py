"""Cache layers of fixed size in packed storage, in place of the stock static layers of transformers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .cache_layers import StoredMixin
from .quantizer_config import LayerStorage
from .storage import Store, clear_visible, counter_of, make_static_store
from .storage.static_window import StaticWindowLayer


class PackedStaticMixin(StoredMixin):
    """A static layer with packed keys and values. The stores' own static layers know where tokens go."""

    # A flag and not a look at the length, which lies in a tensor.
    has_tokens = False
    mask_columns = 0  # of the last call
    masks_prompt_alone = False  # see `mask_prompts_alone`

    def is_first_call(self) -> bool:
        return not self.has_tokens

    def new_store(self, side: str, tokens: Tensor) -> Store:
        limits = {"max_cache_len": self.max_cache_len, "sliding_window": self.max_cache_len}
        heads, width = tokens.shape[1], tokens.shape[3]
        return make_static_store(
            getattr(self.storage, side), heads, width, tokens.dtype, partial(self.stock_class, **limits)
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.key_store, self.value_store = self.new_store("key", key_states), self.new_store("value", value_states)
        self.is_initialized = True

    def append(self, key_states: Tensor, value_states: Tensor) -> bool:
        self.mask_columns = self.get_mask_sizes(key_states.shape[-2])[0]
        exact = self.put(key_states, value_states)
        self.has_tokens = True
        return exact

    def visible(self, key_states: Tensor, value_states: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        if not exact:
            keys, values = super().visible(key_states, value_states, exact)
            return keys[:, :, : self.mask_columns], values[:, :, : self.mask_columns]
        # As many as the mask has columns; it hides those that hold no token yet.
        missing = self.mask_columns - key_states.shape[-2]
        return F.pad(key_states, (0, 0, 0, missing)), F.pad(value_states, (0, 0, 0, missing))

    def visible_tokens(self, query_length: int) -> int:
        return self.mask_columns

    def lengths(self) -> Tensor:
        length = self._counter().cumulative_length.clamp(max=self.mask_columns)
        return length.to(torch.int32).repeat(self.batch_size)

    def settle(self) -> None:
        for store in self.stores():
            clear_visible(store)

    def _counter(self) -> StaticLayer | None:
        return counter_of(self.key_store) if self.is_initialized else None

    def get_seq_length(self) -> int | Tensor:
        return self._counter().get_seq_length() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        if self.masks_prompt_alone and not self.has_tokens:
            return query_length, 0
        return (
            self._counter().get_mask_sizes(query_length)
            if self.is_initialized
            else super().get_mask_sizes(query_length)
        )

    def crop(self, tokens_to_remove: int) -> None:
        count = self._count_to_crop(tokens_to_remove)
        for store in self.stores():
            store.crop(count)
        self.has_tokens = int(self.get_seq_length()) > 0

    def reset(self) -> None:
        for store in self.stores():
            store.reset()
        self.has_tokens = False


class PackedStaticLayer(PackedStaticMixin, StaticLayer):
    """`StaticLayer` in packed storage."""

    stock_class = StaticLayer

    def __init__(self, max_cache_len: int, storage: LayerStorage):
        super().__init__(max_cache_len=max_cache_len)
        self.storage = storage


class PackedStaticSlidingWindowLayer(PackedStaticMixin, StaticWindowLayer):
    """`StaticWindowLayer` in packed storage."""

    stock_class = StaticWindowLayer

    def __init__(self, max_cache_len: int, sliding_window: int, storage: LayerStorage):
        super().__init__(max_cache_len=max_cache_len, sliding_window=sliding_window)
        self.storage = storage


def mask_prompts_alone(layers: list[CacheLayerMixin]) -> None:
    """Let first tokens be masked, and attended to, as they are in a cache that grows.

    The mask of a stock cache of fixed size has a column for every slot, and with one no flash kernel takes the prompt:
    a prompt of 32,768 tokens would have a mask of a gigabyte. Layers of a kind share a mask, so it is for caches of
    which all layers know how to hand out a prompt alone.
    """
    if all(hasattr(layer, "masks_prompt_alone") for layer in layers):
        for layer in layers:
            layer.masks_prompt_alone = True
