"""Forms of the kernels that append and read tokens, for compiling ahead of time, with no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .append import PROJECT_ROWS, project_arguments, tile_arguments
from .append_kernels import append_kernel, project_append_kernel
from .dequantize import dequantize_arguments
from .dequantize_kernel import dequantize_kernel
from .variants import Variant


# code, bits, width, groups, block of the rotation
FORMS = (
    ("fp8", 8, 64, 0, 0),
    *(("symmetric", bits, 64, 1, 0) for bits in (8, 4, 3, 2)),
    *(("asymmetric", bits, 128, 4, 0) for bits in (8, 4, 3, 2)),
    ("asymmetric", 3, 80, 1, 0),
    ("asymmetric", 4, 62, 1, 0),
    *(("symmetric", bits, width, 1, width) for bits, width in ((8, 64), (4, 64), (4, 128), (2, 80))),
    ("asymmetric", 4, 128, 4, 128),
    ("symmetric", 4, 256, 1, 128),
    *(("codebook", bits, 64, 1, 64) for bits in (4, 3, 2)),
    ("codebook", 4, 128, 1, 128),
    ("codebook", 3, 256, 1, 256),
)
POINTERS = {
    "payload": "*u8",
    "scales": "*fp16",
    "head_scales": "*fp32",
    "start": "*i64",
    "rotation": "*i32",
    "midpoints": "*fp32",
    "code_squares": "*fp64",
    "levels": "*fp32",
}
TOKENS = ("tokens", "inputs", "down", "latents", "out")
# Strides of rows of latents and of packed tokens, and pointers, as they mostly are.
UNEVEN = ("position", "other_position", "count", "capacity", "rows", "token_stride_c", "scales_stride_n")


def variants() -> Iterator[Variant]:
    """Appends of one token and of many, of one side and of both; projections; reads, turned back and not."""
    for code, bits, width, groups, block in FORMS:
        name = f"{code} {bits} width={width} groups={groups} block={block}"
        absent = [
            *(["scales"] if code == "fp8" else ["head_scales"]),
            *([] if block else ["rotation"]),
            *([] if code == "codebook" else ["midpoints", "code_squares", "levels"]),
        ]
        rotation = torch.empty(block, block, device="meta") if block else None
        for count, dtype, sides in ((1, "*bf16", 2), (16, "*bf16", 2), (4096, "*fp16", 1)):
            arguments = tile_arguments(code, bits, width, groups, rotation, count)
            gone = [*absent, *(["start", "other_tokens", "other_payload"] if sides == 1 else [])]
            label = f"append {count} {dtype} sides={sides} {name}"
            yield _variant(label, append_kernel, dtype, gone, {**arguments, "SIDES": sides}, sides)
        arguments = project_arguments(code, bits, width, groups, rotation, PROJECT_ROWS, 4096)
        yield _variant(f"project {name}", project_append_kernel, "*bf16", absent, arguments)
        arguments = dequantize_arguments(code, bits, width, groups, block, 4096)
        form = _variant(f"read {name}", dequantize_kernel, "*bf16", absent, arguments)
        yield form._replace(signature={**form.signature, **({"rotation": "*fp32"} if block else {})})


def _variant(name: str, kernel, dtype: str, absent: list[str], arguments: dict, sides: int = 2) -> Variant:
    """A form whose arguments of these names are None; of one side, all `other` ones but the position."""
    options = {key: arguments.pop(key) for key in ("num_warps", "num_stages") if key in arguments}
    types = {}
    for argument in kernel.arg_names:
        own = argument.removeprefix("other_")
        alone = sides == 1 and own != argument and own != "position"
        if argument in arguments:
            continue
        if own in absent or argument in absent or alone:
            arguments[argument] = None
        else:
            types[argument] = POINTERS.get(own) or (dtype if own in TOKENS else "i32")
    even = tuple(argument for argument in types if argument not in UNEVEN)
    return Variant(name, kernel, types, arguments, divisible=even, **options)
