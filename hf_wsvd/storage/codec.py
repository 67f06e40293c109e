"""The contract of token-wise storage schemes: one token of one head in, packed bytes and its scales out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels.encoding import Encoding
from ..kernels.stored_tokens import StoredTokens


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

    Encoding computes in fp32, on any device (meta included), without a look at a value on the host.

    Attributes:
        width: numbers a token and head, `head_dim` or a rank.
        state: what the codec has to remember beside the tokens, by name (most schemes: nothing). A saved cache has it.
        constants: tensors that are alike for every codec of the kind (rotations, codebooks), filled by `to`.
    """

    # Whether codes depend on `state`, and with it on what was encoded before.
    stateful: ClassVar[bool] = False

    def __init__(self, width: int):
        self.width = width
        self.state: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}

    @abstractmethod
    def encode(self, tokens: Tensor) -> Packed:
        """Code `tokens [B, H, N, width]`, of any floating dtype. `to` has been called with their device before."""

    @abstractmethod
    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The tokens as they read back: `[B, H, N, width]` in `dtype`."""

    def decode_into(self, packed: Packed, out: Tensor) -> None:
        """The same, written into `out [B, H, N, width]`, in its dtype."""
        out.copy_(self.decode(packed, out.dtype))

    def stored(self, packed: Packed) -> StoredTokens | None:
        """The same tokens as kernels take them, views; None for a scheme that kernels do not know."""
        return None

    def encoding(self) -> Encoding | None:
        """What `encode` does, as kernels take it; None for a scheme that kernels do not know, and before `to`."""
        return None

    def observe(self, tokens: Tensor) -> None:
        """Set the state that `encode` of these tokens needs, as it would itself."""
        return None

    def rotation(self) -> Tensor | None:
        """What turns tokens before they are coded, fp32 `[width, width]`: a token reads as `numbers @ rotation.T`,
        numbers as `StoredTokens` has them. None for none, and before `to`."""
        return None

    def of_heads(self, heads: slice) -> Codec:
        """A codec that reads the tokens of some heads: itself where all heads share what it knows."""
        return self

    def to(self, device: torch.device) -> None:
        """Bring state and constants to `device`; schemes with constants fill them here from a shared store."""
        self.state = {name: value.to(device) for name, value in self.state.items()}

    def reset(self) -> None:
        """Forget the state, as for a new prompt."""
        self.state = {}

    def __deepcopy__(self, memo: dict) -> Codec:
        new = self.__class__.__new__(self.__class__)
        vars(new).update(vars(self))
        new.state = {name: value.clone() for name, value in self.state.items()}
        return new


def codec_obstacle(codec: Codec) -> str | None:
    """Why kernels cannot read what a codec packs; None where they can."""
    known = type(codec).stored is not Codec.stored
    return None if known else f"kernels do not know what {type(codec).__name__} packs"
