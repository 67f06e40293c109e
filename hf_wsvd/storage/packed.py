"""Tokens kept in the packed form of a codec."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from .codec import Codec, Packed
from .store import BufferStore, Piece, check_names


class PackedStore(BufferStore):
    """Tokens coded one by one: every operation leaves the codes of what remains as they are.

    Args:
        codec: for tokens of its width.
        heads: of the tokens.
        dtype: that tokens read back in.
    """

    kinds: ClassVar[dict[str, str]] = {"payload": "payload", "scales": "scales"}

    def __init__(self, codec: Codec, heads: int, dtype: torch.dtype):
        super().__init__()
        self.codec = codec
        self.heads, self.width, self.dtype = heads, codec.width, dtype

    @torch.no_grad()
    def append(self, tokens: Tensor) -> None:
        if not self.buffers:
            self.codec.to(tokens.device)
        packed = self.codec.encode(tokens)
        self._put("payload", packed.payload)
        if packed.scales.shape[-1]:
            self._put("scales", packed.scales)

    @torch.no_grad()
    def read(self) -> Tensor:
        return self.codec.decode(self._packed(), self.dtype)

    @torch.no_grad()
    def read_into(self, out: Tensor) -> None:
        self.codec.decode_into(self._packed(), out)

    def _packed(self) -> Packed:
        payload = self.buffers["payload"].view
        if "scales" in self.buffers:
            scales = self.buffers["scales"].view
        else:
            scales = payload.new_empty((*payload.shape[:-1], 0), dtype=torch.float16)
        return Packed(payload, scales)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.codec.to(device)

    def reset(self) -> None:
        super().reset()
        self.codec.reset()

    def pieces(self) -> Iterator[Piece]:
        yield from super().pieces()
        for kind, tensors in (("scales", self.codec.state), ("constants", self.codec.constants)):
            for tensor in tensors.values():
                yield Piece(kind, tensor, tensor.nbytes)

    def packed(self) -> dict[str, Tensor]:
        return {**super().packed(), **self.codec.state}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.reset()
        if not state:
            return
        # The form that such tensors have, from one token. (On the meta device this takes 20 times as long.)
        probe = copy.copy(self.codec)
        probe.to(torch.device("cpu"))
        packed = probe.encode(torch.zeros(1, self.heads, 1, probe.width, dtype=self.dtype, device="cpu"))
        wanted = {"payload": packed.payload}
        if packed.scales.shape[-1]:
            wanted["scales"] = packed.scales
        check_names(state, {**wanted, **probe.state})
        for name, like in probe.state.items():
            if state[name].shape != like.shape or state[name].dtype != like.dtype:
                raise ValueError(f"{name} is {list(state[name].shape)} {state[name].dtype}, wanted {list(like.shape)}")
            if not bool(state[name].isfinite().all()):
                raise ValueError(f"{name} is not finite")
        self._load({name: state[name] for name in wanted}, wanted)
        self.codec.state = {name: state[name].clone() for name in probe.state}
        self.codec.to(state["payload"].device)
