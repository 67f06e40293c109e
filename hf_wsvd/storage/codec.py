"""The contract of token-wise storage schemes: one token of one head in, packed bytes and its scales out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Tokens in the form in which they are kept.

    Attributes:
        payload: `[B, H, N, bytes]` uint8, or `[B, H, N, width]` in a floating dtype.
        scales: `[B, H, N, numbers]` float16; `numbers` may be 0.
    """

    payload: Tensor
    scales: Tensor


class Codec(ABC):
    """Codes every token of every head by itself, so that whatever happens to other tokens leaves it as it is.

    Encoding runs under `torch.no_grad`, in fp32, on any device (meta included), without a look at a value on the host.

    Args:
        width: numbers a token and head, `head_dim` or a rank.
    """

    def __init__(self, width: int):
        self.width = width

    @abstractmethod
    def encode(self, tokens: Tensor) -> Packed:
        """Code `tokens [B, H, N, width]`, of any floating dtype."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The tokens as they read back: `[B, H, N, width]` in `dtype`."""

    def state(self) -> dict[str, Tensor]:
        """Tensors that the codec keeps beside the tokens and that a saved cache needs; most schemes have none."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave; the caller has compared names, shapes and dtypes with those of `state`."""

    def constants(self) -> list[Tensor]:
        """Tensors that are the same for every cache of this kind (rotations, codebooks)."""
        return []

    def to(self, device: torch.device | str) -> None:
        """Move state and constants to another device."""

    def reset(self) -> None:
        """Forget the state, as for a new prompt."""
