"""Tokens along the second-to-last axis of a preallocated tensor that grows in small steps."""

from __future__ import annotations

import torch
from torch import Tensor


def slack(tokens: int) -> int:
    """Spare tokens allocated when a buffer grows: 1/64 of the length, in whole eights.

    Copying `tokens` once in `tokens / 64` appends costs 64 token copies an append at any length (concatenation costs
    `tokens`), and the unused memory stays below 1.6 %.
    """
    return max(8, -(-tokens // 64 // 8) * 8)


def whole_blocks(tokens: int, device: torch.device) -> int:
    """`tokens`, on a GPU rounded up to whole eights: there, kernels copy from multiples of 16 bytes."""
    return -(-tokens // 8) * 8 if device.type == "cuda" else tokens


class TokenBuffer:
    """A tensor `[..., capacity, width]` of which tokens `start` to `end` are in use."""

    def __init__(self):
        self.data: Tensor | None = None
        self.start = 0
        self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def view(self) -> Tensor:
        """The tokens in use, without a copy: `[..., len(self), width]`."""
        return self.data[..., self.start : self.end, :]

    @property
    def used(self) -> int:
        """Bytes of the tokens in use; the rest of `data` is slack."""
        return 0 if self.data is None else self.view.numel() * self.data.element_size()

    def append(self, tokens: Tensor) -> Tensor:
        """Add `tokens [..., n, width]` and return the view of all."""
        if len(self) == 0:  # nothing to keep: the new tokens may have another batch, dtype or device
            self.start, self.end = 0, tokens.shape[-2]
            room = whole_blocks(tokens.shape[-2], tokens.device)
            if room == tokens.shape[-2] or torch.is_grad_enabled():
                self.data = tokens.clone(memory_format=torch.contiguous_format)
            else:
                self.data = tokens.new_empty((*tokens.shape[:-2], room, tokens.shape[-1]))
                self.view.copy_(tokens)
            return self.view
        # Earlier views may be saved for a backward pass, which in-place writes would break.
        if torch.is_grad_enabled() and self.data.is_floating_point():
            self.data = torch.cat([self.view, tokens], dim=-2)
            self.start, self.end = 0, self.data.shape[-2]
            return self.view
        start = self.reserve(tokens.shape[-2])
        self.data[..., start : self.end, :] = tokens
        return self.view

    def reserve(self, count: int) -> int:
        """Count `count` more tokens in, beside some; returns where in `data` the caller is to write them."""
        frozen = self.data.is_inference() and not torch.is_inference_mode_enabled()
        if self.end + count > self.data.shape[-2] or frozen:
            self._move(len(self) + count)
        self.end += count
        return self.end - count

    def _move(self, tokens: int) -> None:
        """Move the tokens in use to the front of a tensor with room for `tokens` and some more."""
        old = self.view
        self.data = old.new_empty((*old.shape[:-2], whole_blocks(tokens + slack(tokens), old.device), old.shape[-1]))
        self.data[..., : old.shape[-2], :] = old
        self.start, self.end = 0, old.shape[-2]

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` tokens."""
        self.end = max(self.start, self.end - tokens)

    def keep_last(self, tokens: int) -> None:
        """Drop all but the last `tokens` tokens.

        Their memory is reused when the buffer next moves, or freed now where it is the greater part (a prompt much
        longer than a sliding window).
        """
        self.start = max(self.start, self.end - tokens)
        if self.start > len(self) > 0:
            self.data = self.view.clone(memory_format=torch.contiguous_format)
            self.start, self.end = 0, self.data.shape[-2]

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        """Keep rows `index` of the batch, in that order (boolean masks and slices too); the slack stays."""
        if self.data is not None:
            self.data = self.data[index.to(self.data.device) if isinstance(index, Tensor) else index]

    def repeat_batch(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        if self.data is not None:
            self.data = self.data.repeat_interleave(repeats, dim=0)

    def to(self, device: torch.device | str) -> None:
        """Move the memory to another device."""
        if self.data is not None:
            self.data = self.data.to(device, non_blocking=True)
