"""Cache layers that grow without concatenation, in any storage, in place of the stock layers of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from .call import DenseCall, active_call
from .image_tokens import ImageTokens, current_image_tokens
from .quantizer_config import WHOLE_LAYER, LayerStorage
from .storage import Store, append_both, make_store
from .storage.runs import Run


logger = logging.get_logger("hf_wsvd")


class StoredMixin:
    """A layer whose keys and values lie in a `Store` each, in the form that `storage` says.

    `keys` and `values` are what the stores read: `[B, H, S, width]`, views where tokens are kept as they are.
    """

    storage: LayerStorage = WHOLE_LAYER
    key_store: Store | None = None
    value_store: Store | None = None
    expansions: dict | None = None  # what expands packed tokens for kernels, worked out once
    held_expansions: dict | None = None  # of before the last reset

    @property
    def keys(self) -> Tensor | None:
        return self.key_store.read() if self.has_any() else None

    @keys.setter
    def keys(self, tokens: Tensor | None) -> None:
        self._set("key", tokens)

    @property
    def values(self) -> Tensor | None:
        return self.value_store.read() if self.has_any() else None

    @values.setter
    def values(self, tokens: Tensor | None) -> None:
        self._set("value", tokens)

    def has_any(self) -> bool:
        """Whether the layer holds tokens; a window of one token holds none between calls."""
        return self.key_store is not None and not self.is_first_call()

    def _set(self, side: str, tokens: Tensor | None) -> None:
        """transformers assigns None and empty tensors to say that a layer is empty."""
        store = None
        if tokens is not None and tokens.numel():
            store = self.new_store(side, tokens)
            store.append(tokens)
        setattr(self, f"{side}_store", store)

    def new_store(self, side: str, tokens: Tensor) -> Store:
        """An empty store for tokens like these."""
        heads, width = tokens.shape[1], tokens.shape[3]
        return make_store(getattr(self.storage, side), side, heads, width, tokens.dtype)

    def stores(self) -> tuple[Store, ...]:
        """Those of keys and values; none before the first tokens."""
        return () if self.key_store is None else (self.key_store, self.value_store)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.key_store, self.value_store = self.new_store("key", key_states), self.new_store("value", value_states)

    def is_first_call(self) -> bool:
        """Whether the layer, initialized, holds no tokens yet."""
        return len(self.key_store) == 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store the tokens of a call; return what attention is to read.

        Where the call's attention reads the layer as it is kept (`DenseCall`), it gets the new tokens back.
        """
        exact = self.append(key_states, value_states)
        call = active_call()
        if isinstance(call, DenseCall) and call.layer is self and not exact and call.takes(key_states, value_states):
            return key_states, value_states
        visible = self.visible(key_states, value_states, exact)
        self.settle()
        if isinstance(call, DenseCall) and call.layer is self:
            call.handed = visible
        return visible

    def append(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Store tokens. Attention is to read `visible`, or `runs`; `settle` follows.

        Returns:
            Whether attention gets the new tokens as they are rather than as they were stored.
        """
        return self.put(key_states, value_states)

    def visible(self, key_states: Tensor, value_states: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        """What attention is to read after `append`, whose arguments and result are given: `[B, H, S, width]` each."""
        return (key_states, value_states) if exact else (self.key_store.read(), self.value_store.read())

    def visible_heads(self, heads: slice, query_length: int) -> tuple[Tensor, Tensor]:
        """The same of some heads, all as they are stored, after a call of `query_length` tokens."""
        return self.key_store.read_heads(heads), self.value_store.read_heads(heads)

    def obstacle(self) -> str | None:
        """Why kernels cannot read the stores; None where they can."""
        return next((reason for store in self.stores() if (reason := store.obstacle()) is not None), None)

    def runs(self, query_length: int) -> tuple[list[Run], list[Run]]:
        """The same as `visible` after a call of `query_length` tokens, as it is kept. Only without `obstacle`."""
        return self.key_store.runs(), self.value_store.runs()

    def visible_tokens(self, query_length: int) -> int:
        """How many tokens `visible` gives after a call of `query_length` tokens."""
        return len(self.key_store)

    def lengths(self) -> Tensor | None:
        """Tokens among the slots that `runs` gives, int32 `[B]` on the device; None where all hold tokens."""
        return None

    def settle(self) -> None:
        """Drop what only the attention of the last call had to read."""

    def put(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Append the tokens of a call. Returns whether attention is to see them as they are ("exact" first tokens).

        Raises:
            ValueError: tokens of another batch, shape or device than those held, or (where storage depends on it) of
            which nobody told whether they are of images.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        first = self.is_first_call()
        if not self.storage.whole and key_states.requires_grad and not (first and self.storage.prefill == "exact"):
            logger.warning_once(
                "hf_wsvd: a packed cache passes no gradients to the keys and values that it holds: train without cache"
            )
        if self.storage.by_class:
            told = self._told(key_states)
            self.key_store.append_marked(key_states, told)
            self.value_store.append_marked(value_states, told)
        elif self.storage.key == self.storage.value and not self.storage.whole:
            append_both(self.key_store, self.value_store, key_states, value_states)
        else:
            self.key_store.append(key_states)
            self.value_store.append(value_states)
        return first and not self.storage.whole and self.storage.prefill == "exact"

    def _told(self, key_states: Tensor) -> ImageTokens:
        """Which of the tokens of this call are of images."""
        told = current_image_tokens()
        if told is None:
            raise ValueError(
                "this cache keeps tokens of images otherwise than those of text, and this call does not show which "
                "are which: it goes past the model that the cache was made for, or has inputs_embeds, no input_ids. "
                "Call that model with input_ids, or inside `with hf_wsvd.image_tokens(mask):`"
            )
        told.check(key_states.shape[0], key_states.shape[2])
        return told

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        for store, tokens in zip(self.stores(), (key_states, value_states)):
            if store.batch not in (0, tokens.shape[0]):
                raise ValueError(
                    f"this cache holds {store.batch} sequences and got tokens of {tokens.shape[0]}: change it with "
                    "batch_repeat_interleave, batch_select_indices or reorder_cache, or use a new cache"
                )
            if (tokens.shape[1], tokens.shape[3]) != (store.heads, store.width):
                raise ValueError(
                    f"this cache holds {store.heads} heads of width {store.width} and got {tokens.shape[1]} of "
                    f"{tokens.shape[3]}: it belongs to another model"
                )
        if self.key_store.batch == 0:  # new or empty again
            self.device = key_states.device
        elif key_states.device != self.device:
            raise ValueError(f"this cache lies on {self.device} and got tokens on {key_states.device}")

    def offload(self) -> None:
        for store in self.stores():
            store.to(torch.device("cpu"))

    def prefetch(self) -> None:
        for store in self.stores():
            store.to(self.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select_batch(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_batch(indices)

    def _select_batch(self, index: Tensor) -> None:
        for store in self.stores():
            store.select_batch(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for store in self.stores():
            store.repeat_batch(repeats)

    def _count_to_crop(self, tokens_to_remove: int) -> int:
        """Number of tokens to drop.

        Raises:
            ValueError: for a positive argument, as transformers does since 5.20, and for more tokens than there are.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end"
            )
        if -tokens_to_remove > int(self.get_seq_length()):
            raise ValueError(f"crop({tokens_to_remove}): the cache holds {int(self.get_seq_length())} tokens")
        return -int(tokens_to_remove)  # assisted decoding of transformers before 5.24 gives a tensor


class GrowingLayer(StoredMixin, DynamicLayer):
    """`DynamicLayer` without a concatenation a token, in any storage.

    Args:
        storage: the default keeps the model's dtype.
    """

    def __init__(self, storage: LayerStorage = WHOLE_LAYER):
        super().__init__()
        self.storage = storage

    def get_seq_length(self) -> int:
        return len(self.key_store) if self.key_store is not None else 0

    def reset(self) -> None:
        # Tokens are dropped, not zeroed: transformers before 5.18 zeroes, and the next prompt would follow the zeros.
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        count = self._count_to_crop(tokens_to_remove)
        for store in self.stores():
            store.crop(count)


class GrowingSlidingWindowLayer(StoredMixin, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer` without a concatenation a token, in any storage (but for sink tokens)."""

    def __init__(self, sliding_window: int, storage: LayerStorage = WHOLE_LAYER):
        super().__init__(sliding_window=sliding_window)
        self.storage = storage

    def append(self, key_states: Tensor, value_states: Tensor) -> bool:
        if self.is_initialized:
            self.settle()  # an interrupted call did not
        exact = self.put(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        return exact

    def visible(self, key_states: Tensor, value_states: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
        keys, values = super().visible(key_states, value_states, exact)
        if not self.record_past:
            return keys, values
        count = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -count:], values[:, :, -count:]

    def visible_heads(self, heads: slice, query_length: int) -> tuple[Tensor, Tensor]:
        count = self.visible_tokens(query_length)
        keys, values = super().visible_heads(heads, query_length)
        return keys[:, :, -count:], values[:, :, -count:]

    def runs(self, query_length: int) -> tuple[list[Run], list[Run]]:
        both = super().runs(query_length)
        beyond = len(self.key_store) - self.visible_tokens(query_length)
        if beyond == 0:
            return both
        keys, values = ([part for run in runs for part in run.without_first(beyond)] for runs in both)
        return keys, values

    def visible_tokens(self, query_length: int) -> int:
        tokens = super().visible_tokens(query_length)
        return min(tokens, self.sliding_window - 1 + query_length) if self.record_past else tokens

    def settle(self) -> None:
        if not self.record_past:
            self._keep_window()

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        count = self._count_to_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        beyond_window = self.cumulative_length >= self.sliding_window
        if beyond_window and not self.record_past:
            raise RuntimeError(
                "a sliding layer past its window can be cropped only after `activate_past_recording()`: "
                "the tokens that would come back into the window are gone"
            )
        for store in self.stores():
            store.crop(count)
        self.cumulative_length -= count
        if beyond_window:
            self._keep_window()

    def _keep_window(self) -> None:
        for store in self.stores():
            store.keep_last(self.sliding_window - 1)
