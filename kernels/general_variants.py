"""Forms of the general decode kernel and its merge for compiling ahead of time, with no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .combine import CHANGING as MERGE_CHANGING
from .combine import combine_arguments, combine_kernel
from .decode_call import DecodeCall
from .general_decode import CHANGING, general_decode_kernel
from .general_launch import choose_tile, launch_arguments
from .latent_heads import Rotation
from .packing import packed_width
from .stored_tokens import DecodePart, KeyNormWeights, StoredTokens
from .tiles import Tile
from .variants import ARCHITECTURES, Variant


TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


class Form(NamedTuple):
    """What a form of the kernel is compiled for; the default is a decode step of bf16 latents with rotation."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    rank: int = 64
    code: str = "float"
    bits: int = 16
    groups: int = 1
    rows: int = 1
    rotated: int | None = None  # all channels; 0: none
    interleaved: bool = False
    mask: torch.dtype | None = None
    norm: str | None = None  # "before" or "after"
    extras: bool = False  # bias, softcap, window, lengths, starts, places and heads

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value is not None)


FORMS = (
    *(
        Form(dtype, head_dim, rank)
        for dtype in (torch.bfloat16, torch.float16)
        for head_dim, rank in ((64, 32), (80, 40), (96, 48), (128, 64), (128, 80), (128, 128), (256, 128))
    ),
    *(Form(code="symmetric", bits=bits) for bits in (8, 4, 3, 2)),
    *(Form(code="asymmetric", bits=bits, groups=2) for bits in (8, 4, 3, 2)),
    *(Form(code="codebook", bits=bits) for bits in (4, 3, 2)),
    Form(code="fp8", bits=8),
    Form(torch.float32, bits=32),
    Form(torch.float16, code="asymmetric", bits=4, rank=62),
    *(Form(rows=rows) for rows in (16, 64)),
    Form(code="symmetric", bits=4, rows=64, head_dim=256, rank=128),
    Form(code="asymmetric", bits=4, head_dim=256, rank=256),
    Form(rank=128, code="symmetric", bits=4, rotated=0),
    Form(rank=128, code="asymmetric", bits=2, groups=4),
    *(Form(rotated=64, interleaved=interleaved, norm="before") for interleaved in (False, True)),
    Form(interleaved=True, norm="after", rows=16),
    *(Form(mask=mask, extras=True, rows=16) for mask in (torch.bool, torch.bfloat16)),
    Form(torch.float16, extras=True),
)


def variants() -> Iterator[Variant]:
    """All of `FORMS`, and the merges that they need."""
    merges = {}
    for form in FORMS:
        part, call = operands(form)
        shape = (1, 4, form.rows, 128)
        partial, lse = _empty(*shape, form.rank), _empty(*shape)
        served: dict[Tile, tuple[int, ...]] = {}
        for architecture in ARCHITECTURES:
            tile = choose_tile(part, call, architecture)
            served[tile] = (*served.get(tile, ()), architecture)
        for tile, architectures in served.items():
            arguments, constants = launch_arguments(part, call, partial, lse, tile.split_tokens)
            constants["TOKENS"] = tile.block_tokens
            options = (tile.num_warps, tile.num_stages)
            name = f"general_decode {form} tokens={tile.block_tokens}"
            found = variant(name, general_decode_kernel, arguments, constants, CHANGING, *options)
            yield found._replace(architectures=architectures)
        merges[form.dtype, form.head_dim, part.value_up is None, form.rank] = (part, partial, lse)
    for (dtype, head_dim, latent, rank), (part, partial, lse) in merges.items():
        out = _empty(1, partial.shape[2], 4, head_dim, dtype=dtype)
        arguments, constants = combine_arguments(partial, lse, out, None, part.value_up, part.value_bias)
        yield variant(
            f"combine {dtype} {head_dim} {rank} {latent}",
            combine_kernel,
            arguments,
            constants,
            MERGE_CHANGING,
            4,
            1,
        )


def variant(
    name: str,
    kernel: Any,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    changing: list[str],
    num_warps: int,
    num_stages: int,
) -> Variant:
    """The form that a launch with these arguments has, tensors being of any device (meta too)."""
    signature, divisible, constexprs = {}, [], dict(constants)
    for argument, value in arguments.items():
        fixed = argument not in changing
        if value is None or (isinstance(value, int) and value == 1 and fixed):
            constexprs[argument] = value
            continue
        kind = TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if isinstance(value, int) else "fp32"
        signature[argument] = kind
        if isinstance(value, Tensor) or (isinstance(value, int) and fixed and value % 16 == 0):
            divisible.append(argument)
    return Variant(name, kernel, signature, constexprs, num_warps, num_stages, tuple(divisible))


def operands(form: Form) -> tuple[DecodePart, DecodeCall]:
    """Tensors without memory for a form: 4 KV heads, 32,768 tokens."""
    heads, tokens, batch = 4, 32768, 2
    rotated = form.head_dim if form.rotated is None else form.rotated
    rows = [_empty(1, tokens, rotated // 2, dtype=form.dtype) for _ in range(2)]
    rotation = Rotation(*rows, form.interleaved) if rotated else None
    stored = _stored(form, batch, heads, tokens)
    up = _empty(heads, form.head_dim, form.rank, dtype=form.dtype) if form.rank < form.head_dim else None
    norm = None if form.norm is None else KeyNormWeights(_empty(form.head_dim), 1e-6, form.norm == "before")
    part, query = DecodePart(stored, stored, up, up), _empty(batch, heads, form.rows, form.head_dim, dtype=form.dtype)
    mask = None if form.mask is None else _empty(batch, 1, form.rows, tokens, dtype=form.mask)
    call = DecodeCall(query, heads, tokens, 0.1, rotation, mask, norm=norm)
    if form.extras:
        bias = _empty(heads, form.head_dim, dtype=form.dtype)
        places = _empty(batch, tokens, dtype=torch.int32)
        part = part._replace(key_bias=bias, value_bias=bias, places=places, heads=tuple(range(heads)))
        counts = _empty(batch, dtype=torch.int32)
        call = call._replace(softcap=30.0, window=4096, lengths=counts, starts=counts)
    return part, call


def _stored(form: Form, batch: int, heads: int, tokens: int) -> StoredTokens:
    shape = (batch, heads, tokens)
    if form.code == "float":
        return StoredTokens(_empty(*shape, form.rank, dtype=form.dtype), None, form.rank, bits=form.bits)
    payload = _empty(*shape, packed_width(form.rank, form.bits), dtype=torch.uint8)
    if form.code == "fp8":
        return StoredTokens(payload, None, form.rank, form.code, form.bits, _empty(heads))
    numbers = form.groups * (2 if form.code == "asymmetric" else 1)
    levels = _empty(2**form.bits) if form.code == "codebook" else None
    scales = _empty(*shape, numbers, dtype=torch.float16)
    return StoredTokens(payload, scales, form.rank, form.code, form.bits, levels=levels)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
