"""New tokens into a cache in one launch: rotate, quantize, pack and write; for latents also project."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .append_checks import FLOATS, Slots, check_encoding, check_slots, check_tokens
from .encoding import Encoding, encode_oracle, level_range
from .packing import CODES_A_UNIT, padded_width
from .triton_support import check_device, launch_device


# Rows of a tile of projected tokens, the least that tensor cores take, and input features a step.
PROJECT_ROWS, PROJECT_STEP = 16, 64


def append_tokens(tokens: Sequence[Tensor], encodings: Sequence[Encoding], slots: Sequence[Slots]) -> None:
    """Code tokens and write them into the buffers of a store; of one side of a layer, or of keys and values at once.

    Args:
        tokens: `[B, H, n, width]` each, in any floating dtype of 16 or 32 bits, with any strides.
        encodings: of each side.
        slots: of each side.

    Two sides take one launch where shapes, strides and encodings are alike (but for head scales), else two.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; tokens that the buffers have no room for.
    """
    for one, encoding, target in zip(tokens, encodings, slots, strict=True):
        check_encoding(encoding, one.shape[1] if one.ndim == 4 else 0)
        check_tokens(one, encoding)
        check_slots(target, encoding, one.shape[0], one.shape[1], one.shape[2], one.device)
    if not tokens or not tokens[0].numel():
        return
    sides = list(zip(tokens, encodings, slots))
    batches = [sides] if len(sides) == 2 and _alike(*sides) else [[side] for side in sides]
    for batch in batches:
        torch.ops.hf_wsvd.append_tokens(
            [one for one, _, _ in batch],
            [target.payload for _, _, target in batch],
            [target.scales for _, _, target in batch if target.scales is not None],
            [target.start for _, _, target in batch if target.start is not None],
            [encoding.head_scales for _, encoding, _ in batch if encoding.head_scales is not None],
            _constants(batch[0][1]),
            [target.position for _, _, target in batch],
            *batch[0][1][:4],
        )


def encode_tokens(tokens: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """`tokens [B, H, n, width]` coded in one launch: payload `[B, H, n, bytes]` uint8, scales `[B, H, n, numbers]`
    float16 (of which there may be 0). Equal to `encode_oracle`.

    Raises:
        ValueError: as `append_tokens`.
    """
    check_encoding(encoding, tokens.shape[1] if tokens.ndim == 4 else 0)
    check_tokens(tokens, encoding)
    payload = tokens.new_empty((*tokens.shape[:-1], encoding.payload_width), dtype=torch.uint8)
    scales = tokens.new_empty((*tokens.shape[:-1], encoding.scales_width), dtype=torch.float16)
    append_tokens([tokens], [encoding], [Slots(payload, scales if encoding.scales_width else None)])
    return payload, scales


def project_append(inputs: Tensor, down: Tensor, encoding: Encoding, slots: Slots) -> Tensor:
    """Latents `c = D_h x` of new tokens, coded and written as `append_tokens` does, in one launch.

    One program a head reads its rows of the down factor, 16 tokens at a time: for decode steps.

    Args:
        inputs: `[B, n, in_features]`, last axis contiguous.
        down: `[H, width, in_features]`, last axis contiguous, in the dtype of `inputs`.
        encoding, slots: of the latents.

    Returns:
        The latents `[B, H, n, width]` in that dtype, of which the codes are; summed in fp32, then rounded once.

    Raises:
        ValueError: as `append_tokens`, and for inputs and factors that do not fit.
    """
    check_encoding(encoding, down.shape[0] if down.ndim == 3 else 0)
    check_device("inputs", inputs)
    for name, tensor in (("inputs", inputs), ("down", down)):
        if tensor.ndim != 3 or tensor.dtype not in FLOATS or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; allowed: three "
                f"dimensions of one of {FLOATS}, the last contiguous"
            )
    heads = down.shape[0]
    if down.dtype != inputs.dtype or down.device != inputs.device or down.shape[2] != inputs.shape[2]:
        raise ValueError(
            f"down is {list(down.shape)} {down.dtype} on {down.device}, inputs {list(inputs.shape)} {inputs.dtype} on "
            f"{inputs.device}; allowed: the same last size, dtype and device"
        )
    if down.shape[1] != encoding.width:
        raise ValueError(f"down has {down.shape[1]} rows a head; allowed: the encoding's width, {encoding.width}")
    check_slots(slots, encoding, inputs.shape[0], heads, inputs.shape[1], inputs.device)
    return torch.ops.hf_wsvd.project_append(
        inputs,
        down,
        slots.payload,
        slots.scales,
        slots.start,
        encoding.head_scales,
        _constants(encoding),
        slots.position,
        *encoding[:4],
    )


def project_append_oracle(inputs: Tensor, down: Tensor, encoding: Encoding, slots: Slots) -> Tensor:
    """The same in plain torch, with latents summed in fp64."""
    latents = torch.einsum("bni,hri->bhnr", inputs.double(), down.double()).to(inputs.dtype)
    payload, scales = encode_oracle(latents, encoding)
    first = slots.position + (0 if slots.start is None else int(slots.start))
    slots.payload[:, :, first : first + inputs.shape[1]] = payload
    if slots.scales is not None:
        slots.scales[:, :, first : first + inputs.shape[1]] = scales
    return latents


def _alike(first: tuple[Tensor, Encoding, Slots], other: tuple[Tensor, Encoding, Slots]) -> bool:
    """Whether one launch can serve both sides."""
    (tokens, encoding, slots), (other_tokens, other_encoding, other_slots) = first, other
    pairs = [(tokens, other_tokens), (slots.payload, other_slots.payload), (slots.scales, other_slots.scales)]
    return (
        encoding[:4] == other_encoding[:4]
        and all(one is two for one, two in zip(_constants(encoding), _constants(other_encoding)))
        and (encoding.rotation is None) == (other_encoding.rotation is None)
        and (encoding.head_scales is None) == (other_encoding.head_scales is None)
        and (slots.start is None) == (other_slots.start is None)
        and all(
            one is two is None or (one.shape == two.shape and one.stride() == two.stride() and one.dtype == two.dtype)
            for one, two in pairs
        )
    )


def _constants(encoding: Encoding) -> list[Tensor]:
    return [part for part in (encoding.rotation, encoding.midpoints, encoding.squares) if part is not None]


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def tile_arguments(
    code: str, bits: int, width: int, groups: int, rotation: Tensor | None, count: int
) -> dict[str, int | str]:
    """The compile-time arguments of `encode_tile`, and warps, for `count` tokens a sequence."""
    planes = 1 if bits == 8 else CODES_A_UNIT[bits]
    in_plane = padded_width(width, bits) // planes
    lowest, highest, step, offset = level_range(code, bits) if code in ("symmetric", "asymmetric") else (0, 0, 1, 0)
    block = 0 if rotation is None else rotation.shape[0]
    columns = planes * _next_power(in_plane)
    tokens = min(_next_power(count), max(1, (512 if block else 1024) // columns))
    return {
        "TOKENS": tokens,
        "CODE": code,
        "BITS": bits,
        "WIDTH": width,
        "GROUPS": groups,
        "LOWEST": lowest,
        "HIGHEST": highest,
        "CODE_STEP": step,
        "OFFSET": offset,
        "P": planes,
        "Q": in_plane,
        "QP": _next_power(in_plane),
        "BLOCK": block,
        "BLOCK_PADDED": _next_power(block),
        # A step of the rotation has so many products in registers.
        "STEP": max(1, min(_next_power(block), 4096 // (tokens * columns))),
        "num_warps": 4 if block or tokens * columns > 512 else 1,
    }


def project_arguments(
    code: str, bits: int, width: int, groups: int, rotation: Tensor | None, rows: int, in_features: int
) -> dict[str, int | str]:
    """The same of `project_append_kernel`, for `rows` tokens of all sequences."""
    return {
        **tile_arguments(code, bits, width, groups, rotation, min(rows, PROJECT_ROWS)),
        "ROWS": PROJECT_ROWS,
        "WIDTH_PADDED": max(16, _next_power(width)),
        "IN_FEATURES": in_features,
        "IN_STEP": PROJECT_STEP * (2 if width <= 64 else 1),
        "num_warps": 4,
        "num_stages": 3,
    }


def _constants_of(code: str, constants: list[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rotation, midpoints and squares of the list that an operator gets."""
    if code == "codebook":
        return constants[0], constants[1], constants[2]
    return (constants[0] if constants else None), None, None


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.stride()[:axes]


@torch.library.custom_op("hf_wsvd::append_tokens", mutates_args=("payloads", "scales"))
def _append_op(
    tokens: list[Tensor],
    payloads: list[Tensor],
    scales: list[Tensor],
    starts: list[Tensor],
    head_scales: list[Tensor],
    constants: list[Tensor],
    positions: list[int],
    code: str,
    bits: int,
    width: int,
    groups: int,
) -> None:
    from .append_kernels import append_kernel

    sides = len(tokens)

    def pair(tensors: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        return (tensors[0] if tensors else None), (tensors[1] if len(tensors) == 2 else None)

    batch, heads, count, _ = tokens[0].shape
    rotation, midpoints, squares = _constants_of(code, constants)
    arguments = tile_arguments(code, bits, width, groups, rotation, count)
    grid = (-(-count // arguments["TOKENS"]), heads, batch * sides)
    with launch_device(tokens[0].device):
        append_kernel[grid](
            *pair(tokens),
            *pair(payloads),
            *pair(scales),
            *pair(head_scales),
            *pair(starts),
            rotation,
            midpoints,
            squares,
            positions[0],
            positions[-1],
            count,
            payloads[0].shape[2],
            *tokens[0].stride(),
            *_strides(payloads[0], 3),
            *_strides(scales[0] if scales else None, 3),
            SIDES=sides,
            **arguments,
        )


@_append_op.register_fake
def _(tokens, payloads, scales, starts, head_scales, constants, positions, code, bits, width, groups) -> None:
    return None


@torch.library.custom_op("hf_wsvd::project_append", mutates_args=("payload", "scales"))
def _project_op(
    inputs: Tensor,
    down: Tensor,
    payload: Tensor,
    scales: Tensor | None,
    start: Tensor | None,
    head_scales: Tensor | None,
    constants: list[Tensor],
    position: int,
    code: str,
    bits: int,
    width: int,
    groups: int,
) -> Tensor:
    from .append_kernels import project_append_kernel

    batch, count, in_features = inputs.shape
    heads, rows = down.shape[0], batch * count
    latents = inputs.new_empty((batch, heads, count, width))
    if not rows:
        return latents
    rotation, midpoints, squares = _constants_of(code, constants)
    with launch_device(inputs.device):
        project_append_kernel[(-(-rows // PROJECT_ROWS), heads)](
            inputs,
            down,
            latents,
            payload,
            scales,
            head_scales,
            start,
            rotation,
            midpoints,
            squares,
            position,
            payload.shape[2],
            rows,
            count,
            *_strides(inputs, 2),
            *_strides(down, 2),
            *_strides(latents, 2),
            *_strides(payload, 3),
            *_strides(scales, 3),
            **project_arguments(code, bits, width, groups, rotation, rows, in_features),
        )
    return latents


@_project_op.register_fake
def _(inputs, down, payload, scales, start, head_scales, constants, position, code, bits, width, groups) -> Tensor:
    return inputs.new_empty((inputs.shape[0], down.shape[0], inputs.shape[1], width))
