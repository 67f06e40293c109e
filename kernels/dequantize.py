"""Packed tokens back in floating point, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from .append_checks import FLOATS
from .encoding import level_range
from .packing import packed_width, padded_width, unpack
from .stored_tokens import StoredTokens
from .triton_support import check_device, launch_device


def dequantize(
    stored: StoredTokens, dtype: torch.dtype | None = None, rotation: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The tokens `[B, H, S, width]` as they read, computed in fp32 and rounded once.

    Args:
        stored: with any code.
        dtype: bf16, fp16 or fp32; that of `out` where one is given.
        rotation: fp32 `[block, block]`; every block of channels is turned back by its transpose.
        out: to write into, any strides with the last axis contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    check_stored(stored)
    if out is None:
        out = stored.payload.new_empty((*stored.payload.shape[:-1], stored.width), dtype=dtype or torch.float32)
    shape = (*stored.payload.shape[:-1], stored.width)
    fits = tuple(out.shape) == shape and out.dtype in FLOATS and out.device == stored.payload.device
    if not fits or dtype not in (None, out.dtype) or (out.numel() and out.stride(-1) != 1):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} on {out.device}, dtype {dtype}; allowed: {list(shape)}, one of "
            f"{FLOATS}, on {stored.payload.device}, the last axis contiguous"
        )
    if rotation is not None:
        block = rotation.shape[0] if rotation.ndim else 0
        fits = block and tuple(rotation.shape) == (block, block) and stored.width % block == 0
        if not fits or rotation.dtype != torch.float32 or not rotation.is_contiguous():
            raise ValueError(
                f"rotation is {list(rotation.shape)} {rotation.dtype}; allowed: [block, block] torch.float32, "
                f"contiguous, block a divisor of the width, {stored.width}"
            )
    if out.numel():
        payload, scales, width, code, bits, head_scales, levels = stored
        torch.ops.hf_wsvd.dequantize(payload, scales, head_scales, levels, rotation, out, width, code, bits)
    return out


def read_tokens(stored: StoredTokens, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers that `stored` stands for, by definition: `[B, H, S, width]` in `dtype`, computed in it."""
    if stored.code == "float":
        return stored.payload.to(dtype)
    if stored.code == "fp8":
        levels = stored.payload.view(torch.float8_e4m3fn).to(dtype)
        return levels if stored.head_scales is None else levels * stored.head_scales.to(dtype)[:, None, None]
    codes = unpack(stored.payload, stored.width, stored.bits)
    if stored.code == "codebook":
        levels = stored.levels.to(dtype)[codes.long()]
    elif stored.code == "symmetric":
        _, _, step, offset = level_range("symmetric", stored.bits)
        levels = step * (codes.view(torch.int8) if stored.bits == 8 else codes).to(dtype) - offset
    else:
        levels = codes.to(dtype)
    scales = stored.scales.to(dtype).unsqueeze(-1)
    levels = levels.unflatten(-1, (stored.groups, -1))
    if stored.code == "asymmetric":
        scale, zero = scales.chunk(2, dim=-2)
        return (scale * levels + zero).flatten(-2)
    return (scales * levels).flatten(-2)


def dequantize_oracle(
    stored: StoredTokens, dtype: torch.dtype = torch.float32, rotation: Tensor | None = None
) -> Tensor:
    """The same as `dequantize` in plain torch; turned back in fp64."""
    numbers = read_tokens(stored, torch.float32)
    if rotation is not None:
        blocks = numbers.double().unflatten(-1, (-1, len(rotation)))
        numbers = (blocks @ rotation.double().T).flatten(-2)
    return numbers.to(dtype)


def check_stored(stored: StoredTokens) -> None:
    """ValueError for tokens whose tensors do not fit their code."""
    payload, scales = stored.payload, stored.scales
    allowed = {"float": (16, 32), "fp8": (8,), "symmetric": (8, 4, 3, 2), "asymmetric": (8, 4, 3, 2)}
    allowed["codebook"] = (4, 3, 2)
    if stored.bits not in allowed.get(stored.code, ()):
        raise ValueError(f"stored: code={stored.code!r} with bits={stored.bits} is not allowed; allowed: {allowed}")
    size = stored.width if stored.code == "float" else packed_width(stored.width, stored.bits)
    dtypes = FLOATS if stored.code == "float" else (torch.uint8,)
    fits = payload.ndim == 4 and payload.shape[3] == size and payload.dtype in dtypes
    if not fits or (payload.numel() and payload.stride(-1) != 1):
        raise ValueError(
            f"stored: payload is {list(payload.shape)} {payload.dtype}; allowed: [B, H, S, {size}] of one of "
            f"{dtypes}, the last axis contiguous"
        )
    check_device("stored: payload", payload)
    if stored.code not in ("float", "fp8"):
        fits = scales is not None and scales.shape[:-1] == payload.shape[:-1] and scales.dtype == torch.float16
        if fits:
            fits = stored.groups > 0 and stored.width % stored.groups == 0 and scales.stride(-1) == 1
        if not fits or (stored.code == "codebook" and stored.groups != 1):
            found = "None" if scales is None else f"{list(scales.shape)} {scales.dtype}"
            raise ValueError(
                f"stored: scales are {found}; allowed: {[*payload.shape[:-1]]} and a divisor of {stored.width} (twice "
                "that for 'asymmetric', 1 for 'codebook'), torch.float16, the last axis contiguous"
            )
    for name, wanted in (("head_scales", payload.shape[1]), ("levels", 2**stored.bits)):
        tensor = getattr(stored, name)
        if tensor is None and (name, stored.code) != ("levels", "codebook"):
            continue
        if (
            tensor is None
            or tuple(tensor.shape) != (wanted,)
            or tensor.dtype != torch.float32
            or tensor.stride(0) != 1
        ):
            found = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"stored: {name} is {found}; allowed: [{wanted}] torch.float32, contiguous")


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def dequantize_arguments(
    code: str, bits: int, width: int, groups: int, block: int, count: int
) -> dict[str, int | str]:
    """The compile-time arguments of `dequantize_kernel`, and warps, for `count` tokens; `block` 0: no rotation."""
    _, _, step, offset = level_range("symmetric", bits) if code == "symmetric" else (0, 0, 1, 0)
    columns = max(16 if block else 1, _next_power(block or width))
    return {
        # Tensor cores take 16 rows at least.
        "TOKENS": max(16, min(64, 4096 // columns)) if block else max(1, min(_next_power(count), 2048 // columns)),
        "CODE": code,
        "BITS": bits,
        "WIDTH": width,
        "PADDED": width if code == "float" else padded_width(width, bits),
        "GROUPS": groups,
        "GROUP_SIZE": width // groups if groups else width,
        "CODE_STEP": step,
        "OFFSET": offset,
        "BLOCK": block,
        "COLUMNS": columns,
        "STEP": 32 if 16 < block <= 128 else 16,  # more would spill registers
        "num_warps": 4,
    }


@torch.library.custom_op("hf_wsvd::dequantize", mutates_args=("out",))
def _dequantize_op(
    payload: Tensor,
    scales: Tensor | None,
    head_scales: Tensor | None,
    levels: Tensor | None,
    rotation: Tensor | None,
    out: Tensor,
    width: int,
    code: str,
    bits: int,
) -> None:
    from .dequantize_kernel import dequantize_kernel

    batch, heads, count, _ = payload.shape
    groups = StoredTokens(payload, scales, width, code, bits).groups
    block = 0 if rotation is None else rotation.shape[0]
    arguments = dequantize_arguments(code, bits, width, groups, block, count)
    blocks = -(-count // arguments["TOKENS"]) * (width // block if block else 1)
    with launch_device(payload.device):
        dequantize_kernel[(blocks, heads, batch)](
            payload,
            scales,
            head_scales,
            levels,
            rotation,
            out,
            count,
            *payload.stride()[:3],
            *((0, 0, 0) if scales is None else scales.stride()[:3]),
            *out.stride()[:3],
            **arguments,
        )


@_dequantize_op.register_fake
def _(payload, scales, head_scales, levels, rotation, out, width, code, bits) -> None:
    return None
