"""Checks of the arguments of `fused_attention`, by shapes, dtypes and devices alone.

Every function here raises ValueError that names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .decode_call import DecodeCall, layer_heads, part_heads
from .packing import packed_width
from .stored_tokens import DecodePart, StoredTokens
from .triton_support import allowed_devices, runs_on


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_QUERIES = 16
LARGEST_HEAD = 256
BITS = {"float": (16, 32), "fp8": (8,), "symmetric": (8, 4, 3, 2), "asymmetric": (8, 4, 3, 2), "codebook": (4, 3, 2)}
SCALED = ("symmetric", "asymmetric", "codebook")


def refuse(name: str, given: Any, allowed: Any) -> None:
    raise ValueError(f"{name}={given} is not allowed; allowed: {allowed}")


def check_query(query: Tensor) -> None:
    """Shape, dtype and device of the queries."""
    if query.dim() != 4:
        refuse("query", _described(query), "[B, Hq, N, D]")
    if query.dtype not in FLOATS:
        refuse("query.dtype", query.dtype, FLOATS)
    if not 1 <= query.shape[2] <= MOST_QUERIES:
        refuse("query.shape[2]", query.shape[2], f"1 to {MOST_QUERIES} query tokens")
    if not 1 <= query.shape[3] <= LARGEST_HEAD:
        refuse("query.shape[3]", query.shape[3], f"a head of 1 to {LARGEST_HEAD} channels")
    if 0 in query.shape:
        refuse("query", _described(query), "no axis of length 0")
    _check_last_axis("query", query)
    if not runs_on(query.device):
        refuse("query.device", query.device, allowed_devices())


def check_parts(parts: Sequence[DecodePart], query: Tensor) -> None:
    """All parts, and that they have all heads of a layer of the query's heads."""
    if not parts:
        refuse("parts", parts, "at least one")
    for number, part in enumerate(parts):
        check_part(f"parts[{number}]", part, query)
    count = layer_heads(parts)
    if not 1 <= count <= query.shape[1]:
        refuse("parts", f"(tokens of {count} KV heads)", f"1 to {query.shape[1]}, the query's heads")
    present = [head for part in parts for head in part_heads(part)]
    missing = [head for head in range(count) if head not in present]
    if missing:
        refuse("parts", f"(no tokens of heads {missing})", f"all heads up to the largest, {count - 1}")
    if query.shape[1] % count:
        refuse("query.shape[1]", query.shape[1], f"a multiple of the {count} KV heads")


def check_part(name: str, part: DecodePart, query: Tensor) -> None:
    """One part by itself."""
    batch, head_dim = query.shape[0], query.shape[3]
    if part.key.payload.dim() != 4:
        refuse(f"{name}.key.payload", _described(part.key.payload), "[B, H, S, width or bytes]")
    shape = (batch, *part.key.payload.shape[1:3])
    for side in ("key", "value"):
        stored = getattr(part, side)
        check_stored(f"{name}.{side}", stored, shape, query)
        up, bias = getattr(part, f"{side}_up"), getattr(part, f"{side}_bias")
        if up is None and stored.width != head_dim:
            refuse(
                f"{name}.{side}_up", None, f"[{shape[1]}, {head_dim}, {stored.width}], as tokens are no whole heads"
            )
        _check_tensor(f"{name}.{side}_up", up, (shape[1], head_dim, stored.width), FLOATS, query)
        _check_tensor(f"{name}.{side}_bias", bias, (shape[1], head_dim), FLOATS, query)
    if part.heads is not None:
        heads = tuple(part.heads)
        if len(set(heads)) != shape[1] or len(heads) != shape[1] or any(head < 0 for head in heads):
            refuse(f"{name}.heads", part.heads, f"{shape[1]} different heads from 0 on, as the payload has")
    if part.places is None and part.first < 0:
        refuse(f"{name}.first", part.first, "0 or more")
    _check_tensor(f"{name}.places", part.places, ((1, batch), shape[2]), (torch.int32,), query)


def check_stored(name: str, stored: StoredTokens, shape: tuple[int, int, int], query: Tensor) -> None:
    """Payload and scales of tokens of `shape [B, H, S]`."""
    if stored.code not in BITS:
        refuse(f"{name}.code", repr(stored.code), tuple(BITS))
    if stored.bits not in BITS[stored.code]:
        refuse(f"{name}.bits", stored.bits, f"one of {BITS[stored.code]} with code {stored.code!r}")
    if not 1 <= stored.width <= LARGEST_HEAD:
        refuse(f"{name}.width", stored.width, f"1 to {LARGEST_HEAD}")
    plain = stored.code == "float"
    bytes_a_token = stored.width if plain or stored.code == "fp8" else packed_width(stored.width, stored.bits)
    dtypes = ((torch.float32,) if stored.bits == 32 else FLOATS[:2]) if plain else (torch.uint8,)
    _check_tensor(f"{name}.payload", stored.payload, (*shape, bytes_a_token), dtypes, query)
    if (stored.scales is not None) != (stored.code in SCALED):
        refuse(f"{name}.scales", _described(stored.scales), f"a tensor with the codes {SCALED}, None with others")
    if stored.scales is not None:
        kinds = 2 if stored.code == "asymmetric" else 1
        numbers = stored.scales.shape[-1] if stored.scales.dim() else 0
        if numbers == 0 or numbers % kinds or stored.width % (numbers // kinds):
            refuse(f"{name}.scales", _described(stored.scales), f"groups of equal size of {stored.width} channels")
        _check_tensor(f"{name}.scales", stored.scales, (*shape, numbers), (torch.float16,), query)
    if stored.head_scales is not None and stored.code != "fp8":
        refuse(f"{name}.head_scales", _described(stored.head_scales), "None but with code 'fp8'")
    _check_tensor(f"{name}.head_scales", stored.head_scales, (shape[1],), (torch.float32,), query)
    if (stored.levels is not None) != (stored.code == "codebook"):
        refuse(f"{name}.levels", _described(stored.levels), "a tensor with code 'codebook', None with others")
    _check_tensor(f"{name}.levels", stored.levels, (2**stored.bits,), (torch.float32,), query)


def check_call(call: DecodeCall) -> None:
    """What the parts of a call share."""
    query = call.query
    batch, heads, queries, head_dim = query.shape
    if call.rotation is not None:
        cos, sin = call.rotation.cos, call.rotation.sin
        for name, rows in (("rotation.cos", cos), ("rotation.sin", sin)):
            if rows.dim() != 3 or not 1 <= rows.shape[2] <= head_dim // 2 or rows.shape[1] < call.tokens:
                shape = f"[1 or {batch}, at least {call.tokens}, 1 to {head_dim // 2}]"
                refuse(name, _described(rows), shape)
            _check_tensor(name, rows, ((1, batch), cos.shape[1], cos.shape[2]), FLOATS, query)
        if cos.shape != sin.shape:
            refuse("rotation.sin", _described(sin), f"the shape of rotation.cos, {list(cos.shape)}")
    mask = call.mask
    if mask is not None:
        if mask.dtype != torch.bool and mask.dtype not in FLOATS:
            refuse("mask.dtype", mask.dtype, (torch.bool, *FLOATS))
        fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
        fits = fits and (mask.shape[2] == 1 or mask.shape[2] >= queries)
        if not fits or (call.tokens < 2**31 - 1 and mask.shape[3] < call.tokens):
            shape = f"[1 or {batch}, 1 or {heads}, 1 or {queries}, at least {call.tokens}]"
            refuse("mask", _described(mask), shape)
        _check_device("mask", mask, query)
    _check_tensor("lengths", call.lengths, (batch,), (torch.int32,), query)
    _check_tensor("starts", call.starts, (batch,), (torch.int32,), query)
    if call.softcap is not None and not 0 < call.softcap < math.inf:
        refuse("softcap", call.softcap, "a positive, finite number or None")
    if call.window is not None and call.window < 1:
        refuse("window", call.window, "1 or more, or None")
    if call.norm is not None:
        _check_tensor("norm.weight", call.norm.weight, (head_dim,), FLOATS, query)


def _check_tensor(name: str, tensor: Tensor | None, shape: tuple, dtypes: tuple[torch.dtype, ...], query: Tensor):
    """None passes. A size of `shape` may be a tuple of choices."""
    if tensor is None:
        return
    choices = [size if isinstance(size, tuple) else (size,) for size in shape]
    if tensor.dim() != len(shape) or any(size not in allowed for size, allowed in zip(tensor.shape, choices)):
        wanted = ", ".join(" or ".join(map(str, dict.fromkeys(allowed))) for allowed in choices)
        refuse(name, _described(tensor), f"[{wanted}]")
    if tensor.dtype not in dtypes:
        refuse(f"{name}.dtype", tensor.dtype, dtypes)
    _check_last_axis(name, tensor)
    _check_device(name, tensor, query)


def _check_last_axis(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(f"{name}.stride()", tensor.stride(), "a contiguous last axis")


def _check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        refuse(f"{name}.device", tensor.device, f"the query's, {query.device}")


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
