"""The contract of stores: what one cache layer keeps of its keys, or of its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..image_tokens import ImageTokens
from .runs import Run
from .token_buffer import TokenBuffer


class Piece(NamedTuple):
    """One tensor of a store, for accounts of memory.

    Attributes:
        kind: "payload" (tokens as they are kept), "scales", "window" (tokens kept beside them in full precision),
            "places" (where tokens of two classes are) or "constants" (one for all stores of a scheme and width).
        tensor: the allocated tensor.
        used: bytes of it that hold tokens; the rest of its storage is slack.
    """

    kind: str
    tensor: Tensor
    used: int


class Store(ABC):
    """Tokens `[B, H, N, width]` of one side of one layer, in whatever form.

    A store is empty at first and takes batch and device from the first tokens. Positions count from the oldest token
    kept. What remains after any operation reads back exactly as before it.

    Attributes:
        heads, width, dtype: of the tokens.
    """

    heads: int
    width: int
    dtype: torch.dtype

    @abstractmethod
    def __len__(self) -> int:
        """Tokens kept of a sequence."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Sequences; 0 for an empty store."""

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Add `tokens [B, H, n, width]` at the end."""

    def append_marked(self, tokens: Tensor, image_tokens: ImageTokens) -> None:
        """The same, told which tokens are of images; most stores treat all tokens alike."""
        self.append(tokens)

    @abstractmethod
    def read(self) -> Tensor:
        """All tokens that attention may see, `[B, H, N, width]` in the model's dtype. A view where that can be."""

    def read_into(self, out: Tensor) -> None:
        """The same, written into `out [B, H, N, width]`: a part of a larger result without a copy more."""
        out.copy_(self.read())

    def read_heads(self, heads: slice) -> Tensor:
        """The same of some neighbouring heads, without unpacking the others where that can be.

        Args:
            heads: with a start and a stop.
        """
        return self.read()[:, heads]

    @abstractmethod
    def packed(self) -> dict[str, Tensor]:
        """The tensors as they are kept: views by name (nested stores prefix theirs)."""

    def obstacle(self) -> str | None:
        """Why kernels cannot read the tokens as they are kept; None where they can."""
        return f"{type(self).__name__} keeps tokens in a form that kernels do not know"

    def runs(self) -> list[Run]:
        """What `read` would give, as it is kept, in as few runs as it lies in. Only without `obstacle`."""
        raise NotImplementedError(self.obstacle())

    @abstractmethod
    def crop(self, count: int) -> None:
        """Drop the newest `count` tokens, at most all."""

    @abstractmethod
    def keep_last(self, count: int) -> None:
        """Drop all but the newest `count` tokens."""

    @abstractmethod
    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        """Keep rows `index` of the batch, in that order."""

    @abstractmethod
    def repeat_batch(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the tokens to another device."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Every tensor that the store holds."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What `load_state` of an equal, empty store needs to read the same: tensors by name, views without slack."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the tokens of another store's `state`.

        Raises:
            ValueError: names, shapes or dtypes that no such store has.
        """

    @property
    def nbytes(self) -> int:
        """Bytes allocated, slack included."""
        storages = {id_of(piece.tensor): piece.tensor.untyped_storage().nbytes() for piece in self.pieces()}
        return sum(storages.values())


def id_of(tensor: Tensor) -> int:
    """What two tensors of one storage have in common (tensors of the meta device have no address)."""
    return tensor.untyped_storage()._cdata


class BufferStore(Store):
    """A store whose tokens lie in buffers of equal length, one entry a token."""

    kinds: dict[str, str]  # buffer name to `Piece.kind`

    def __init__(self) -> None:
        self.buffers: dict[str, TokenBuffer] = {}

    def _put(self, name: str, tokens: Tensor) -> Tensor:
        return self.buffers.setdefault(name, TokenBuffer()).append(tokens)

    def __len__(self) -> int:
        return max((len(buffer) for buffer in self.buffers.values()), default=0)

    @property
    def batch(self) -> int:
        return next((buffer.data.shape[0] for buffer in self.buffers.values() if len(buffer)), 0)

    def packed(self) -> dict[str, Tensor]:
        return {name: buffer.view for name, buffer in self.buffers.items()}

    def crop(self, count: int) -> None:
        if count >= len(self):
            self.reset()  # an empty store is as good as new: tokens of any batch and device may come next
            return
        for buffer in self.buffers.values():
            buffer.crop(count)

    def keep_last(self, count: int) -> None:
        if count <= 0:
            self.reset()
            return
        for buffer in self.buffers.values():
            buffer.keep_last(count)

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        for buffer in self.buffers.values():
            buffer.select_batch(index)

    def repeat_batch(self, repeats: int) -> None:
        for buffer in self.buffers.values():
            buffer.repeat_batch(repeats)

    def to(self, device: torch.device) -> None:
        for buffer in self.buffers.values():
            buffer.to(device)

    def reset(self) -> None:
        self.buffers = {}

    def pieces(self) -> Iterator[Piece]:
        for name, buffer in self.buffers.items():
            yield Piece(self.kinds[name], buffer.data, buffer.used)

    def state(self) -> dict[str, Tensor]:
        return self.packed()

    def _load(self, state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        """Fill the buffers from `state`, whose tensors must look like `wanted` but for batch and length."""
        check_names(state, wanted)
        self.reset()
        for name, like in wanted.items():
            check_like(name, state[name], like)
        sizes = {(state[name].shape[0], state[name].shape[2]) for name in wanted}
        if len(sizes) > 1:
            raise ValueError(f"tensors {sorted(wanted)} differ in batch or length: {sorted(sizes)}")
        for name in wanted:
            self._put(name, state[name])


def check_names(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """ValueError unless `state` has the names of `wanted`."""
    if set(state) != set(wanted):
        raise ValueError(f"tensors {sorted(state)} were found where {sorted(wanted)} belong")


def check_like(name: str, found: Tensor, like: Tensor) -> None:
    """ValueError unless `found` has the dtype of `like` and its shape but for batch and tokens (axes 0 and 2)."""
    same = found.ndim == 4 and found.dtype == like.dtype
    if not (same and found.shape[1] == like.shape[1] and found.shape[3] == like.shape[3]):
        wanted = f"[any, {like.shape[1]}, any, {like.shape[3]}] {like.dtype}"
        raise ValueError(f"{name} is {list(found.shape)} {found.dtype}, wanted {wanted}")
