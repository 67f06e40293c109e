"""Packed tokens in tensors of fixed size and address, for compiled decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from ..kernels.append import Slots, append_tokens
from . import kernel_path
from .codec import Codec, Packed, codec_obstacle
from .composite import CompositeStore
from .modes import unaffected
from .runs import Run
from .store import Piece, Store


class StaticStore(Store):
    """Payload and scales as the keys and values of a static layer of transformers, which knows where tokens go.

    Args:
        codec: for tokens of its width.
        layer: empty, with the limits of the layer that this store serves.
        heads: of the tokens.
        dtype: that tokens read back in.

    Attributes:
        visible: what the layer returned of the last tokens, until `read` has been asked for: it may hold more than
            what the layer keeps, all tokens of a prompt longer than the window. `clear_visible` frees it.
    """

    def __init__(self, codec: Codec, layer: StaticLayer, heads: int, dtype: torch.dtype):
        self.codec, self.layer = codec, layer
        self.heads, self.width, self.dtype = heads, codec.width, dtype
        self.visible: tuple[Tensor, Tensor] | None = None
        self.held_state: dict[str, Tensor] = {}  # of the codec, where compiled steps expect it

    def __len__(self) -> int:
        return int(self.layer.get_seq_length())

    @property
    def batch(self) -> int:
        return self.layer.keys.shape[0] if self.layer.is_initialized else 0

    @unaffected
    def append(self, tokens: Tensor) -> None:
        self.prepare(tokens.device)
        if self.has_slots(tokens):
            slots = self.slots(tokens)
            append_tokens([tokens], [self.codec.encoding()], [slots])
            self.appended(tokens)
            return
        payload, scales = kernel_path.encode(self.codec, tokens)
        self.hold_addresses()
        # Before transformers 5.18 a static layer gives its values the dtype of its keys: scales go in as bytes.
        scales = scales.view(torch.uint8) if scales.shape[-1] else scales.to(payload.dtype)
        self.visible = self.layer.update(payload, scales)

    def prepare(self, device: torch.device) -> None:
        """Bring an empty store's codec to the device of its first tokens."""
        if not self.layer.is_initialized:
            self.codec.to(device)
            for constant in self.codec.constants.values():
                torch._dynamo.mark_static_address(constant)

    def hold_addresses(self) -> None:
        """Keep the codec's state, which every prompt sets anew, at one address, and mark what graphs need not copy."""
        state = self.codec.state
        if torch.compiler.is_compiling() or all(state[name] is self.held_state.get(name) for name in state):
            return
        for name, value in state.items():
            old = self.held_state.get(name)
            if old is not None and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device):
                state[name] = old.copy_(value)
            torch._dynamo.mark_static_address(state[name])
        self.held_state = dict(state)

    def has_slots(self, tokens: Tensor) -> bool:
        """Whether a kernel can write these tokens where they belong: in a window, the layer moves others for them."""
        grows = type(self.layer).update is StaticLayer.update
        return grows and kernel_path.has_kernels(self.codec, tokens.device, tokens.dtype)

    def slots(self, tokens: Tensor) -> Slots:
        """Where these tokens go; whoever asks writes them, then calls `appended`."""
        self.codec.observe(tokens)
        self.hold_addresses()
        if not self.layer.is_initialized:
            encoding = self.codec.encoding()
            sizes = (encoding.payload_width, 2 * encoding.scales_width)
            none = tokens[:, :, :0, :1].to(torch.uint8)
            self.layer.lazy_initialization(*(none.expand(-1, -1, -1, size) for size in sizes))
        scales = as_scales(self.layer.values) if self.layer.values.shape[-1] else None
        return Slots(self.layer.keys, scales, start=self.layer.cumulative_length)

    def appended(self, tokens: Tensor) -> None:
        """Take note that a kernel wrote these tokens."""
        self.layer.cumulative_length.add_(tokens.shape[2])
        self.visible = (self.layer.keys, self.layer.values)

    @unaffected
    def read(self) -> Tensor:
        payload, scales = self.visible or (self.layer.keys, self.layer.values)
        return kernel_path.decode(self.codec, Packed(payload, as_scales(scales)), self.dtype)

    @unaffected
    def read_heads(self, heads: slice) -> Tensor:
        payload, scales = self.visible or (self.layer.keys, self.layer.values)
        packed = Packed(payload[:, heads], as_scales(scales)[:, heads])
        return kernel_path.decode(self.codec.of_heads(heads), packed, self.dtype)

    def obstacle(self) -> str | None:
        return codec_obstacle(self.codec)

    def runs(self) -> list[Run]:
        payload, scales = self.visible or (self.layer.keys, self.layer.values)
        return [Run.of(self.codec.stored(Packed(payload, as_scales(scales))), self.codec.rotation())]

    def packed(self) -> dict[str, Tensor]:
        return {"payload": self.layer.keys, "scales": as_scales(self.layer.values), **self.codec.state}

    def crop(self, count: int) -> None:
        self.layer.crop(-count)
        if len(self) == 0:  # an empty store is as good as new
            self.codec.reset()

    def keep_last(self, count: int) -> None:
        raise NotImplementedError("a static layer keeps its window by itself")

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        if self.layer.is_initialized:
            self.layer.keys, self.layer.values = self.layer.keys[index], self.layer.values[index]

    def repeat_batch(self, repeats: int) -> None:
        if self.layer.is_initialized:
            self.layer.keys = self.layer.keys.repeat_interleave(repeats, dim=0)
            self.layer.values = self.layer.values.repeat_interleave(repeats, dim=0)

    def to(self, device: torch.device) -> None:
        if self.layer.is_initialized:
            self.layer.keys, self.layer.values = self.layer.keys.to(device), self.layer.values.to(device)
            self.codec.to(device)

    def reset(self) -> None:
        self.layer.reset()
        self.codec.reset()

    def pieces(self) -> Iterator[Piece]:
        if not self.layer.is_initialized:
            return
        size = self.layer.max_cache_len
        for kind, tensor in (("payload", self.layer.keys), ("scales", self.layer.values)):
            yield Piece(kind, tensor, tensor.nbytes // size * min(len(self), size))
        for kind, tensors in (("scales", self.codec.state), ("constants", self.codec.constants)):
            for tensor in tensors.values():
                yield Piece(kind, tensor, tensor.nbytes)

    def state(self) -> dict[str, Tensor]:
        raise NotImplementedError("a static cache cannot be saved")

    def load_state(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError("a static cache cannot be loaded")


def as_scales(values: Tensor) -> Tensor:
    """The fp16 scales in the values of a static layer."""
    if values.shape[-1] == 0:
        return values.new_empty(values.shape, dtype=torch.float16)
    return values.view(torch.float16)


def static_stores(store: Store) -> list[StaticStore]:
    """What a store of fixed size is made of; all parts have the same length."""
    if isinstance(store, CompositeStore):
        return [inner for part in store.parts.values() for inner in static_stores(part)]
    return [store]


def clear_visible(store: Store) -> None:
    """Have `read` give what a store of fixed size keeps, and hold nothing else."""
    for part in static_stores(store):
        part.visible = None
