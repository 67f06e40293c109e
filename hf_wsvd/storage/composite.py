"""Stores made of stores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .store import Piece, Store


class CompositeStore(Store):
    """Passes every operation that concerns the batch or the memory on to its parts."""

    parts: dict[str, Store]

    @property
    def batch(self) -> int:
        return max(part.batch for part in self.parts.values())

    def packed(self) -> dict[str, Tensor]:
        named = ((f"{name}.{inner}", t) for name, part in self.parts.items() for inner, t in part.packed().items())
        return dict(named)

    def obstacle(self) -> str | None:
        return next((reason for part in self.parts.values() if (reason := part.obstacle()) is not None), None)

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        for part in self.parts.values():
            part.select_batch(index)

    def repeat_batch(self, repeats: int) -> None:
        for part in self.parts.values():
            part.repeat_batch(repeats)

    def to(self, device: torch.device) -> None:
        for part in self.parts.values():
            part.to(device)

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    def pieces(self) -> Iterator[Piece]:
        for part in self.parts.values():
            yield from part.pieces()

    def state(self) -> dict[str, Tensor]:
        return {f"{name}.{inner}": t for name, part in self.parts.items() for inner, t in part.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        known = tuple(f"{name}." for name in self.parts)
        for name in state:
            if not name.startswith(known):
                raise ValueError(f"tensor {name} was found where only those of {sorted(self.parts)} belong")
        for name, part in self.parts.items():
            part.load_state({k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")})
        self._check_parts()

    def _check_parts(self) -> None:
        """ValueError if the parts, each right by itself, do not fit together."""
        batches = {part.batch for part in self.parts.values() if len(part)}
        if len(batches) > 1:
            raise ValueError(f"the parts {sorted(self.parts)} differ in batch: {sorted(batches)}")
