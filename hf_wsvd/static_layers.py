"""Cache layers of fixed size in packed storage, in place of the stock static layers of transformers."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import StaticLayer

from .cache_layers import StoredMixin
from .quantizer_config import LayerStorage
from .storage import Store, clear_visible, counter_of, make_static_store
from .storage.static_window import StaticWindowLayer


class PackedStaticMixin(StoredMixin):
    """A static layer with packed keys and values. The stores' own static layers know where tokens go."""

    # A flag and not a look at the length, which lies in a tensor.
    has_tokens = False
    mask_columns = 0  # of the last call

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
            return super().visible(key_states, value_states, exact)
        # As many as the mask has columns; it hides those that hold no token yet.
        missing = self.mask_columns - key_states.shape[-2]
        return F.pad(key_states, (0, 0, 0, missing)), F.pad(value_states, (0, 0, 0, missing))

    def visible_tokens(self, query_length: int) -> int:
        return self.mask_columns

    def settle(self) -> None:
        for store in self.stores():
            clear_visible(store)

    def _counter(self) -> StaticLayer | None:
        return counter_of(self.key_store) if self.is_initialized else None

    def get_seq_length(self) -> int | Tensor:
        return self._counter().get_seq_length() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
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
