"""Tokens kept as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import StoredTokens
from .runs import Run
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

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to tokens that are kept."""
        return len(self) > 0 and self.buffers["tokens"].data.requires_grad

    def append(self, tokens: Tensor) -> None:
        # A mix of dtypes (autocast for a part of the text) is kept in the wider one, as a concatenation would.
        dtype = torch.promote_types(self.dtype, tokens.dtype) if len(self) else tokens.dtype
        if dtype != self.dtype and len(self):
            self.buffers["tokens"].data = self.buffers["tokens"].data.to(dtype)
        self.dtype = dtype
        self._put("tokens", tokens.to(dtype))

    def read(self) -> Tensor:
        return self.buffers["tokens"].view

    def obstacle(self) -> None:
        return None

    def runs(self) -> list[Run]:
        tokens = self.buffers["tokens"].view
        return [Run.of(StoredTokens(tokens, None, self.width, bits=8 * tokens.element_size()))]

    def load_state(self, state: dict[str, Tensor]) -> None:
        like = torch.empty(1, self.heads, 1, self.width, dtype=self.dtype, device="meta")
        self._load(state, {"tokens": like} if state else {})
