"""A sliding window of fixed size whose step of one token is the same graph at any length."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer


class StaticWindowLayer(StaticSlidingWindowLayer):
    """`StaticSlidingWindowLayer` that counts its tokens in a tensor alone.

    The stock layer also counts them in a number, which a compiled step is specialised to: one graph until the window
    is full, another one afterwards, and with CUDA graphs one a length. Here a step of one token moves the window by a
    number of slots, 0 or 1, that lies on the device. The slots hold the newest tokens in order, as there.

    Attributes:
        cumulative_length: int64 `[]`, tokens so far, those that have left the window included.
    """

    is_started = False  # so that a prompt needs no look at the length

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store `[B, H, N, width]` tokens.

        Returns:
            What attention is to see. One token, and several that fit: all slots, of which `get_mask_sizes` shows which
            are filled. Several that do not fit: those of the window before them, and them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        started, self.is_started = self.is_started, True
        if key_states.shape[-2] == 1:
            return self._update_by_one(key_states, value_states)
        count, held = key_states.shape[-2], min(int(self.cumulative_length), self.max_cache_len) if started else 0
        self.cumulative_length.add_(count)
        if held + count <= self.max_cache_len:
            self.keys[:, :, held : held + count] = key_states
            self.values[:, :, held : held + count] = value_states
            return self.keys, self.values
        # A query sees itself and the window's size less one before it.
        first = held - min(held, self.max_cache_len - 1)
        seen = []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            whole = torch.cat((kept[:, :, first:held], new), dim=-2) if held else new
            kept.copy_(whole[:, :, -self.max_cache_len :])
            seen.append(whole)
        return seen[0], seen[1]

    def _update_by_one(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        slots = torch.arange(self.max_cache_len, device=self.device)
        slot = self.cumulative_length.clamp(max=self.max_cache_len - 1).reshape(1)
        source = (slots + (self.cumulative_length >= self.max_cache_len)).clamp(max=self.max_cache_len - 1)
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            moved = kept.index_select(2, source)
            moved.index_copy_(2, slot, new)
            kept.copy_(moved)  # and not assigned: the address stays
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """Columns of the mask and the position of the first; a tensor on the device where a step of one token asks."""
        if not self.is_started:
            return max(query_length, self.max_cache_len), 0
        if query_length == 1:
            return self.max_cache_len, (self.cumulative_length - (self.max_cache_len - 1)).clamp(min=0)
        length = int(self.cumulative_length)
        held = min(length, self.max_cache_len)
        if held + query_length <= self.max_cache_len:
            return self.max_cache_len, 0
        kept = min(held, self.max_cache_len - 1)
        return kept + query_length, length - kept

    def get_seq_length(self) -> int | Tensor:
        return self.cumulative_length if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self.is_started = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number.
            RuntimeError: a window that tokens have left already: those that would come back are gone.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove")
        if tokens_to_remove and int(self.cumulative_length) > self.max_cache_len:
            raise RuntimeError("a sliding window of fixed size that tokens have left cannot be cropped")
        self.cumulative_length.add_(tokens_to_remove)
