"""Tokens kept as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .store import BufferStore


class WholeStore(BufferStore):
    """Tokens in the model's dtype; `read` is a view of them, through which gradients flow.

    Args:
        heads, width, dtype: of the tokens.
        kind: "payload", or "window" for tokens kept beside packed ones.
    """

    def __init__(self, heads: int, width: int, dtype: torch.dtype, kind: str = "payload"):
        super().__init__()
        self.heads, self.width, self.dtype = heads, width, dtype
        self.kinds = {"tokens": kind}

    def append(self, tokens: Tensor) -> None:
        self._put("tokens", tokens.to(self.dtype))

    def read(self) -> Tensor:
        return self.buffers["tokens"].view

    def load_state(self, state: dict[str, Tensor]) -> None:
        like = torch.empty(1, self.heads, 1, self.width, dtype=self.dtype, device="meta")
        self._load(state, {"tokens": like} if state else {})
