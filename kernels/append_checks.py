"""Where new tokens go, and what is checked before they do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .encoding import Encoding
from .triton_support import check_device


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Slots(NamedTuple):
    """Where tokens go: n to slot `start + position + n` of the buffers of a store.

    Attributes:
        payload: `[B, H, capacity, bytes]` uint8, last axis contiguous.
        scales: `[B, H, capacity, numbers]` float16, last axis contiguous; None for a code without.
        position: known to the host.
        start: int64 of one element on the device, for compiled steps; None for 0. It is not looked at on the host:
            tokens past the end of the buffers are dropped.
    """

    payload: Tensor
    scales: Tensor | None
    position: int = 0
    start: Tensor | None = None


def check_encoding(encoding: Encoding, heads: int) -> None:
    """ValueError for an encoding that no kernel has, or whose tensors do not fit it and `heads`."""
    bits = {"fp8": (8,), "symmetric": (8, 4, 3, 2), "asymmetric": (8, 4, 3, 2), "codebook": (4, 3, 2)}
    if encoding.code not in bits or encoding.bits not in bits[encoding.code]:
        raise ValueError(f"encoding: code={encoding.code!r} with bits={encoding.bits} is not allowed; allowed: {bits}")
    groups = encoding.groups
    if encoding.code in ("fp8", "codebook"):
        fits = groups == (encoding.code == "codebook")
    else:
        fits = groups >= 1 and encoding.width % groups == 0
    if encoding.width < 1 or not fits:
        raise ValueError(
            f"encoding: groups={groups} is not allowed with code={encoding.code!r} and width={encoding.width}; "
            "allowed: a divisor of width, 0 for 'fp8', 1 for 'codebook'"
        )
    block = 0 if encoding.rotation is None else encoding.rotation.shape[0]
    if (block and encoding.width % block) or (encoding.code == "codebook" and block != encoding.width):
        raise ValueError(
            f"encoding: a rotation of {block} channels is not allowed with code={encoding.code!r} and "
            f"width={encoding.width}; allowed: a divisor of width, width itself for 'codebook'"
        )
    codebook = encoding.code == "codebook"
    for name, size, dtype, needed in (
        ("head_scales", (heads,), torch.float32, False),
        ("rotation", (block, block), torch.int32, False),
        ("midpoints", (2**encoding.bits - 1,), torch.float32, codebook),
        ("squares", (2**encoding.bits,), torch.float64, codebook),
    ):
        tensor = getattr(encoding, name)
        if tensor is None and not needed:
            continue
        if tensor is None or tuple(tensor.shape) != size or tensor.dtype != dtype or not tensor.is_contiguous():
            found = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"encoding: {name} is {found}; allowed: {list(size)} {dtype}, contiguous")


def check_tokens(tokens: Tensor, encoding: Encoding) -> None:
    """ValueError for tokens that kernels cannot take or that are none of the encoding's."""
    if tokens.ndim != 4 or tokens.shape[3] != encoding.width or tokens.dtype not in FLOATS:
        raise ValueError(
            f"tokens are {list(tokens.shape)} {tokens.dtype}; allowed: [B, H, n, {encoding.width}] of one of {FLOATS}"
        )
    check_device("tokens", tokens)


def check_slots(slots: Slots, encoding: Encoding, batch: int, heads: int, count: int, device: torch.device) -> None:
    """ValueError for buffers that do not fit `count` tokens of an encoding, or have no room for them."""
    capacity = slots.payload.shape[2] if slots.payload.ndim == 4 else 0
    for name, tensor, size, dtype in (
        ("payload", slots.payload, encoding.payload_width, torch.uint8),
        ("scales", slots.scales, encoding.scales_width, torch.float16),
    ):
        if tensor is None and not size:
            continue
        wanted = (batch, heads, capacity, size)
        fits = tensor is not None and tensor.dtype == dtype and tuple(tensor.shape) == wanted and bool(size)
        if not fits or tensor.device != device or (tensor.numel() and tensor.stride(-1) != 1):
            found = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"slots: {name} is {found}; allowed: {list(wanted) if size else None} {dtype} on {device}, the last "
                "axis contiguous"
            )
    if slots.position < 0 or slots.position + count > capacity:
        raise ValueError(
            f"slots: position={slots.position} is not allowed for {count} tokens; allowed: 0 to {capacity - count}"
        )
    start = slots.start
    if start is not None and (start.numel() != 1 or start.dtype != torch.int64 or start.device != device):
        raise ValueError(
            f"slots: start is {list(start.shape)} {start.dtype} on {start.device}; allowed: one int64 on {device}"
        )
