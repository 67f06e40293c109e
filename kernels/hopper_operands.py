"""What the Hopper kernels ask of their operands, and the descriptors by which bulk copies find them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .decode_call import DecodeCall
from .stored_tokens import DecodePart, StoredTokens
from .triton_support import has_triton


HOPPER = (9, 0)  # compute capability
WIDEST = 128  # rank
STEP = 16  # of ranks, so that rows of 8 bits are what a bulk copy can start at
LARGEST_GROUP = 16
HEAD_DIMS = (64, 128)
BITS = {"float": (16,), "symmetric": (8, 4), "asymmetric": (8, 4)}
ALIGNMENT = 16  # bytes, of what a bulk copy starts at


@cache
def hopper_obstacle(device: torch.device) -> str | None:
    """Why the Hopper kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"it needs a Hopper GPU, tensors are on {device.type}"
    obstacle = capability_obstacle(torch.cuda.get_device_capability(device))
    if obstacle is not None:
        return obstacle
    if not has_triton():
        return "triton is not installed"
    try:
        from . import position_query  # noqa: F401  Gluon is experimental: a Triton without what it needs is no error
    except (ImportError, AttributeError) as error:
        return f"this Triton has another Gluon: {error}"
    return None


def capability_obstacle(capability: tuple[int, int]) -> str | None:
    """Why the Hopper kernels cannot run on a GPU of this compute capability; None if they can."""
    if tuple(capability) == HOPPER:
        return None
    return f"it needs compute capability 9.0, the GPU has {capability[0]}.{capability[1]}"


def fast_kernel(group: int) -> str:
    """The kernel that is made for so many query heads a KV head."""
    return "position_query" if group == 1 else "tile_reconstruction"


def form_obstacle(
    head_dim: int, dtype: torch.dtype, group: int, forms: Iterable[tuple[int, str, int, int]], bias: bool, norm: bool
) -> str | None:
    """What is known without operands: why such heads and tokens are not what the Hopper kernels take.

    Args:
        head_dim: channels of a head.
        dtype: of the query.
        group: query heads of a KV head.
        forms: of keys and of values: width, code, bits and groups, see `StoredTokens`.
        bias, norm: whether keys have one.
    """
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}, not one of {HEAD_DIMS}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"query of {str(dtype).removeprefix('torch.')}, not of a 16-bit float"
    if group > LARGEST_GROUP:
        return f"{group} query heads a head, not up to {LARGEST_GROUP}"
    if group == 1 and (bias or norm):
        return "keys have a bias" if bias else "keys are normalised"
    for width, code, bits, groups in forms:
        if bits not in BITS.get(code, ()) or groups > 1:
            return f"code {code!r} of {bits} bits" + (f" in {groups} groups" if groups > 1 else "")
        step = 2 * STEP if bits == 4 else STEP
        if width % step or width > WIDEST:
            return f"rank {width} in {bits} bits, not a multiple of {step} up to {WIDEST}"
        if group > 1 and bits < 16 and dtype != torch.bfloat16:
            return "weights times scales can be too small for float16"
    return None


def operands_obstacle(part: DecodePart, call: DecodeCall) -> str | None:
    """Why one part of a call is not what the Hopper kernel for its groups of query heads takes; None if it is."""
    query, rotation, key, value, norm = call.query, call.rotation, part.key, part.value, call.norm
    head_dim, group = query.shape[3], call.group
    if query.shape[2] > 1:
        return f"{query.shape[2]} query tokens, not 1"
    if rotation is None:
        return "keys are not rotated"
    if rotation.interleaved or 2 * rotation.cos.shape[-1] != head_dim:
        return "rotation of pairs of neighbours" if rotation.interleaved else "a part of each head is not rotated"
    forms = [(stored.width, stored.code, stored.bits, stored.groups) for stored in (key, value)]
    obstacle = form_obstacle(head_dim, query.dtype, group, forms, part.key_bias is not None, norm is not None)
    if obstacle is not None:
        return obstacle
    for name in ("softcap", "window"):
        if getattr(call, name) is not None:
            return f"there is a {name}"
    if part.places is not None:
        return "tokens are not in their order in the sequence"
    if not rotation.cos.dtype == rotation.sin.dtype == query.dtype:
        return f"rotary rows of {rotation.cos.dtype} and {rotation.sin.dtype}, not the query's dtype"
    if any(stored.code == "float" and stored.payload.dtype != query.dtype for stored in (key, value)):
        return "latents and query differ in their dtype"
    up = part.key_up
    if up is None or up.dtype != query.dtype or up.stride(2) != 1:
        return "keys have no expansion in the query's dtype"
    if query.stride(3) != 1:
        return "the query's last axis is not contiguous"
    if part.key_bias is not None and part.key_bias.stride(1) != 1:
        return "the keys' bias is not contiguous"
    if norm is not None and norm.weight.stride(0) != 1:
        return "the norm's weight is not contiguous"
    return mask_obstacle(call.mask) or memory_obstacle(part, call)


def mask_obstacle(mask: Tensor | None) -> str | None:
    """Why the kernels cannot read a mask: it must say by sequence and token alone what is to be seen."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return "there is an additive mask"
    if mask.shape[1] != 1:
        return "there is a mask for each head"
    return None if mask.stride(3) == 1 or mask.shape[3] == 1 else "the mask's last axis is not contiguous"


def memory_obstacle(part: DecodePart, call: DecodeCall) -> str | None:
    """Why bulk copies cannot reach a part's tokens and rotary rows."""
    cos, sin = call.rotation.cos[:, None], call.rotation.sin[:, None]
    tensors = (part.key.payload, part.value.payload, cos, sin)
    strides = [row_strides(tensor) for tensor in tensors]
    if None in strides:
        return "tokens do not follow each other in memory"
    for stored, rows in zip((part.key, part.value), strides):
        if stored.scales is not None and scale_strides(stored) != rows:
            return "scales do not lie as their tokens, or not at multiples of 16 bytes"
    if strides[2] != strides[3]:
        return "cos and sin lie differently"
    if any(tensor.data_ptr() % ALIGNMENT or tensor.shape[3] * tensor.element_size() % ALIGNMENT for tensor in tensors):
        return "tokens do not lie at multiples of 16 bytes"
    return "more than 2^31 tokens times heads" if any(rows_of(tensor) >= 2**31 for tensor in tensors) else None


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


def token_descriptor(tokens: Tensor, count: int, width: int) -> Any:
    """A descriptor of `tokens [B, H, S, ...]` as one matrix of rows, of which blocks `[count, width]` are copied.

    Blocks may be wider than rows: what is outside of the matrix is copied as zeros, and not read.
    """
    return _descriptor(tokens, rows_of(tokens), tokens.shape[3], (count, width))


def scale_descriptor(stored: StoredTokens, count: int) -> Any:
    """A descriptor of the scales as one row, blocks of `count`: fp16, or scale and zero as one uint32.

    Of the payload where there are none: it is not used.
    """
    if stored.scales is None:
        return _descriptor(stored.payload, count, None, (count,))
    numbers = stored.scales if stored.scales.shape[3] == 1 else stored.scales.view(torch.uint32)
    return _descriptor(numbers, rows_of(numbers), None, (count,))


def _descriptor(base: Tensor, rows: int, width: int | None, block: tuple[int, ...]) -> Any:
    """What Triton's class would check again every step is known by now: its fields are taken from one checked once."""
    checked = _checked_descriptor(base.dtype, rows, width, block)
    descriptor = object.__new__(type(checked))
    descriptor.__dict__.update(checked.__dict__, base=base)
    return descriptor


@lru_cache(maxsize=1024)
def _checked_descriptor(dtype: torch.dtype, rows: int, width: int | None, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, strides = ([rows], [1]) if width is None else ([rows, width], [width, 1])
    nothing = torch.empty(0, dtype=dtype)
    return TensorDescriptor(nothing, shape, strides, list(block), shared_layout(dtype, block))


@cache
def shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """The layout in shared memory of a block that bulk copies fill."""
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        return gl.NVMMASharedLayout(0, 8 * dtype.itemsize, 1)
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.uint8: gl.uint8}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])
