"""Tokens kept in the packed form of a codec."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.append import Slots, append_tokens
from . import kernel_path
from .codec import Codec, Packed, codec_obstacle
from .modes import unaffected
from .runs import Run
from .static import StaticStore
from .store import BufferStore, Piece, Store, check_names


# Longer appends are bound by memory, of which one for both sides would take more.
FEW_TOKENS = 16


class PackedStore(BufferStore):
    """Tokens coded one by one: every operation leaves the codes of what remains as they are.

    Args:
        codec: for tokens of its width.
        heads: of the tokens.
        dtype: that tokens read back in, until there are some; then that of the newest.
    """

    kinds: ClassVar[dict[str, str]] = {"payload": "payload", "scales": "scales"}

    def __init__(self, codec: Codec, heads: int, dtype: torch.dtype):
        super().__init__()
        self.codec = codec
        self.heads, self.width, self.dtype = heads, codec.width, dtype

    @unaffected
    def append(self, tokens: Tensor) -> None:
        self.prepare(tokens.device)
        if self.has_slots(tokens):
            slots = self.slots(tokens)
            append_tokens([tokens], [self.codec.encoding()], [slots])
            self.appended(tokens)
        else:
            self._keep(kernel_path.encode(self.codec, tokens), tokens.dtype)

    def has_slots(self, tokens: Tensor) -> bool:
        """Whether a kernel can write these tokens where they belong, after others."""
        return len(self) > 0 and kernel_path.has_kernels(self.codec, tokens.device, tokens.dtype)

    def slots(self, tokens: Tensor) -> Slots:
        """Room for these tokens, counted as held; whoever asks for it writes them."""
        self.codec.observe(tokens)
        (position,) = {buffer.reserve(tokens.shape[2]) for buffer in self.buffers.values()}
        scales = self.buffers.get("scales")
        return Slots(self.buffers["payload"].data, None if scales is None else scales.data, position)

    def appended(self, tokens: Tensor) -> None:
        """Take note that a kernel wrote these tokens."""
        self.dtype = tokens.dtype

    def prepare(self, device: torch.device) -> None:
        """Bring an empty store's codec to the device of its first tokens."""
        if not self.buffers:
            self.codec.to(device)

    def _keep(self, packed: Packed, dtype: torch.dtype) -> None:
        self.dtype = dtype  # what is read goes where the newest tokens go
        self._put("payload", packed.payload)
        if packed.scales.shape[-1]:
            self._put("scales", packed.scales)

    @unaffected
    def read(self) -> Tensor:
        return kernel_path.decode(self.codec, self._packed(), self.dtype)

    @unaffected
    def read_heads(self, heads: slice) -> Tensor:
        packed = Packed(*(part[:, heads] for part in self._packed()))
        return kernel_path.decode(self.codec.of_heads(heads), packed, self.dtype)

    @unaffected
    def read_into(self, out: Tensor) -> None:
        kernel_path.decode_into(self.codec, self._packed(), out)

    def _packed(self) -> Packed:
        payload = self.buffers["payload"].view
        if "scales" in self.buffers:
            scales = self.buffers["scales"].view
        else:
            scales = payload.new_empty((*payload.shape[:-1], 0), dtype=torch.float16)
        return Packed(payload, scales)

    def obstacle(self) -> str | None:
        return codec_obstacle(self.codec)

    def runs(self) -> list[Run]:
        return [Run.of(self.codec.stored(self._packed()), self.codec.rotation())]

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


@unaffected
def append_both(key_store: Store, value_store: Store, keys: Tensor, values: Tensor) -> None:
    """Append to both stores of a layer, whose specs are equal: with one launch or encoding where that gives the same.

    For one token a step, the time goes into starting operations; this takes half as many.
    """
    stores, both = (key_store, value_store), (keys, values)
    if all(isinstance(store, PackedStore | StaticStore) for store in stores):
        for store, tokens in zip(stores, both):
            store.prepare(tokens.device)
        if all(store.has_slots(tokens) for store, tokens in zip(stores, both)):
            slots = [store.slots(tokens) for store, tokens in zip(stores, both)]
            append_tokens(both, [store.codec.encoding() for store in stores], slots)
            for store, tokens in zip(stores, both):
                store.appended(tokens)
            return
    packed = isinstance(key_store, PackedStore) and isinstance(value_store, PackedStore)
    few = keys.shape == values.shape and keys.dtype == values.dtype and keys.shape[2] <= FEW_TOKENS
    if not (packed and few) or key_store.codec.stateful:
        key_store.append(keys)
        value_store.append(values)
        return
    encoded = kernel_path.encode(key_store.codec, torch.cat(both, dim=1))
    for number, store in enumerate(stores):
        store._keep(Packed(*(part.chunk(2, dim=1)[number] for part in encoded)), keys.dtype)
