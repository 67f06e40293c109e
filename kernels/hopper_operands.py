"""What the Hopper kernels ask of their operands, and the descriptors by which bulk copies find them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .decode_call import DecodeCall
from .stored_tokens import DecodePart, StoredTokens
from .triton_support import has_triton


TILE_TOKENS = 128  # two groups of warps of 64 each
RANKS = (32, 64)
HEAD_DIMS = (64, 128)
BITS = {"float": (16,), "symmetric": (8, 4), "asymmetric": (8, 4)}
ALIGNMENT = 16  # bytes, of what a bulk copy starts at


@cache
def hopper_obstacle(device: torch.device) -> str | None:
    """Why the Hopper kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"it needs a Hopper GPU, tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs compute capability 9.0, the GPU has {capability[0]}.{capability[1]}"
    if not has_triton():
        return "triton is not installed"
    try:
        from . import position_query  # noqa: F401  Gluon is experimental: a Triton without what it needs is no error
    except (ImportError, AttributeError) as error:
        return f"this Triton has another Gluon: {error}"
    return None


def form_obstacle(head_dim: int, dtype: torch.dtype, width: int, code: str, bits: int, groups: int) -> str | None:
    """Why heads of `head_dim` over tokens of this form are not what the Hopper kernels take, see `StoredTokens`."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}, not one of {HEAD_DIMS}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"query of {str(dtype).removeprefix('torch.')}, not of a 16-bit float"
    if bits not in BITS.get(code, ()) or groups > 1:
        return f"code {code!r} of {bits} bits" + (f" in {groups} groups" if groups > 1 else "")
    return None if width in RANKS else f"rank {width}, not one of {RANKS}"


def operands_obstacle(part: DecodePart, call: DecodeCall) -> str | None:
    """Why one part of a call does not have the form that the Hopper kernels take; None if it does."""
    query, rotation, key, value = call.query, call.rotation, part.key, part.value
    head_dim = query.shape[3]
    if rotation is None:
        return "keys are not rotated"
    if call.norm is not None or part.key_bias is not None:
        return "keys are normalised" if call.norm is not None else "keys have a bias"
    if rotation.interleaved or 2 * rotation.cos.shape[-1] != head_dim:
        return "rotation of pairs of neighbours" if rotation.interleaved else "a part of each head is not rotated"
    obstacle = form_obstacle(head_dim, query.dtype, key.width, key.code, key.bits, key.groups)
    if obstacle is not None:
        return obstacle
    if not rotation.cos.dtype == rotation.sin.dtype == query.dtype:
        return f"rotary rows of {rotation.cos.dtype} and {rotation.sin.dtype}, not the query's dtype"
    for name in ("mask", "softcap", "window", "starts"):
        if getattr(call, name) is not None:
            return f"there is a {name}"
    if part.places is not None:
        return "tokens are not in their order in the sequence"
    if (key.width, key.code, key.bits, key.groups) != (value.width, value.code, value.bits, value.groups):
        return "keys and values are kept in different forms"
    if key.code == "float" and not key.payload.dtype == value.payload.dtype == query.dtype:
        return "latents and query differ in their dtype"
    up = part.key_up
    if up is None or up.dtype != query.dtype or up.stride(2) != 1:
        return "keys have no expansion in the query's dtype"
    if query.stride(3) != 1:
        return "the query's last axis is not contiguous"
    strides = [row_strides(stored.payload) for stored in (key, value)]
    if None in strides or row_strides(rotation.cos[:, None]) is None:
        return "tokens do not follow each other in memory"
    for stored, rows in zip((key, value), strides):
        if stored.scales is not None and scale_strides(stored) != rows:
            return "scales do not lie as their tokens, or not at multiples of 16 bytes"
    if row_strides(rotation.cos[:, None]) != row_strides(rotation.sin[:, None]):
        return "cos and sin lie differently"
    tensors = (key.payload, value.payload, rotation.cos, rotation.sin)
    if any(
        tensor.data_ptr() % ALIGNMENT or tensor[0, 0].stride(-2) * tensor.element_size() % ALIGNMENT
        for tensor in (key.payload, value.payload, rotation.cos[:, None], rotation.sin[:, None])
    ):
        return "tokens do not lie at multiples of 16 bytes"
    if any(rows_of(tensor if tensor.ndim == 4 else tensor[:, None]) >= 2**31 for tensor in tensors):
        return "more than 2^31 tokens times heads"
    return None


def row_strides(tokens: Tensor) -> tuple[int, int] | None:
    """Rows from a sequence to the next and from a head to the next of `[B, H, S, width]`, whose tokens are rows.

    0 for an axis of one. None where tokens do not follow each other, or heads do not start at a row.
    """
    batch, head, token, last = tokens.stride()
    if last != 1 or token != tokens.shape[3]:
        return None
    rows = [0 if size == 1 else stride for size, stride in zip(tokens.shape[:2], (batch, head))]
    return None if any(stride % token for stride in rows) else (rows[0] // token, rows[1] // token)


def scale_strides(stored: StoredTokens) -> tuple[int, int] | None:
    """The same of scales, None too where a tile of them would not start at a multiple of 16 bytes."""
    rows = row_strides(stored.scales)
    width = stored.scales.shape[3] * stored.scales.element_size()
    if rows is None or stored.scales.data_ptr() % ALIGNMENT or any(stride * width % ALIGNMENT for stride in rows):
        return None
    return rows


def rows_of(tokens: Tensor) -> int:
    """Rows from the first token to the last of `[B, H, S, width]`."""
    batch, head = row_strides(tokens)
    return (tokens.shape[0] - 1) * batch + (tokens.shape[1] - 1) * head + tokens.shape[2]


def token_descriptor(tokens: Tensor) -> Any:
    """A descriptor of `tokens [B, H, S, width]` as one matrix of rows, of which TILE_TOKENS are copied at a time."""
    return _descriptor(tokens, [rows_of(tokens), tokens.shape[3]], [TILE_TOKENS, tokens.shape[3]])


def scale_descriptor(stored: StoredTokens) -> Any:
    """A descriptor of the scales as one row: fp16, or scale and zero as one uint32.

    Of the payload where there are none: it is not used.
    """
    if stored.scales is None:
        return _descriptor(stored.payload, [TILE_TOKENS], [TILE_TOKENS])
    numbers = stored.scales if stored.scales.shape[3] == 1 else stored.scales.view(torch.uint32)
    return _descriptor(numbers, [rows_of(numbers)], [TILE_TOKENS])


def _descriptor(base: Tensor, shape: list[int], block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [shape[1], 1] if len(shape) == 2 else [1]
    return TensorDescriptor(base, shape, strides, block, shared_layout(base.dtype, tuple(block)))


@cache
def shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The layout in shared memory of a block that bulk copies fill."""
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, 1)
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.uint8: gl.uint8}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])
