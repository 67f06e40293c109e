"""First and newest tokens in full precision around a packed middle."""

from __future__ import annotations

import torch
from torch import Tensor

from .composite import CompositeStore
from .runs import Run
from .store import Store
from .whole import WholeStore


class WindowStore(CompositeStore):
    """Keeps the first `sink_length` tokens and the newest `residual_length` as they are, all others in `middle`.

    Tokens are packed one by one as they leave the window. A crop takes from the window first; tokens packed before
    stay packed, so the window is short after it until new tokens fill it.

    Args:
        middle: an empty store.
    """

    def __init__(self, middle: Store, sink_length: int, residual_length: int):
        shape = self.heads, self.width, self.dtype = middle.heads, middle.width, middle.dtype
        self.sink_length, self.residual_length = sink_length, residual_length
        self.sink = WholeStore(*shape, "window")
        self.middle = middle
        self.recent = WholeStore(*shape, "window")
        self.parts = {"sink": self.sink, "middle": self.middle, "recent": self.recent}

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts.values())

    def append(self, tokens: Tensor) -> None:
        # The sink takes tokens only from the very beginning: after that it may be short, never in the wrong place.
        room = self.sink_length - len(self) if len(self) == len(self.sink) else 0
        if room > 0:
            self.sink.append(tokens[:, :, :room])
            tokens = tokens[:, :, room:]
        if tokens.shape[2] == 0:
            return
        leaving = len(self.recent) + tokens.shape[2] - self.residual_length
        if leaving <= len(self.recent):
            if leaving > 0:
                self.middle.append(self.recent.read()[:, :, :leaving])
            self.recent.append(tokens)
            self.recent.keep_last(self.residual_length)
            return
        if len(self.recent):
            tokens = torch.cat([self.recent.read(), tokens], dim=2)
        self.middle.append(tokens[:, :, :leaving])
        self.recent.reset()
        if self.residual_length:
            self.recent.append(tokens[:, :, leaving:])

    def read(self) -> Tensor:
        filled = [part for part in self.parts.values() if len(part)]
        if len(filled) == 1:
            return filled[0].read()
        if self.sink.requires_grad or self.recent.requires_grad:
            return torch.cat([part.read() for part in filled], dim=2)
        # Each part writes its tokens where they belong: a concatenation would copy the whole cache once more.
        device = next(self.pieces()).tensor.device
        out = torch.empty(self.batch, self.heads, len(self), self.width, dtype=filled[-1].dtype, device=device)
        start = 0
        for part in filled:
            part.read_into(out[:, :, start : start + len(part)])
            start += len(part)
        return out

    def read_heads(self, heads: slice) -> Tensor:
        return torch.cat([part.read_heads(heads) for part in self.parts.values() if len(part)], dim=2)

    def runs(self) -> list[Run]:
        found, start = [], 0
        for part in self.parts.values():
            if len(part):
                found.extend(run.moved(start) for run in part.runs())
                start += len(part)
        return found

    def crop(self, count: int) -> None:
        for part in (self.recent, self.middle, self.sink):
            taken = min(count, len(part))
            part.crop(taken)
            count -= taken

    def keep_last(self, count: int) -> None:
        drop = len(self) - count
        for part in (self.sink, self.middle, self.recent):
            taken = min(max(drop, 0), len(part))
            if taken:
                part.keep_last(len(part) - taken)
            drop -= taken

    def _check_parts(self) -> None:
        super()._check_parts()
        if len(self.sink) > self.sink_length or len(self.recent) > self.residual_length:
            raise ValueError(f"the windows hold {len(self.sink)} and {len(self.recent)} tokens, more than they may")
