"""Checks of a compressed checkpoint's files before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import nn


def check_checkpoint(files: list[str] | None, modules: Mapping[str, nn.Module]) -> None:
    """Compare names, shapes and dtypes in the safetensors headers with the modules that the config promises.

    transformers would fill missing tensors with random numbers; here a lost factor is an error.

    Args:
        modules: by name within the model those that are not as in a dense checkpoint, without values.

    Raises:
        ValueError: a file that cannot be read (truncated, not safetensors), or a factor or quantized weight that is
            missing, of another shape or of another kind of numbers.
    """
    if not files:
        return  # weights given as a state dict
    held: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, a safetensors handle is no mapping
                    part = tensors.get_slice(name)
                    held[name] = (tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a readable safetensors file (truncated or corrupted?): {error}"
            ) from error
    wanted = {
        f"{name}.{parameter}": (tuple(tensor.shape), INTEGER_DTYPES.get(tensor.dtype, FLOAT_DTYPES))
        for name, module in modules.items()
        for parameter, tensor in module.named_parameters()
    }
    prefix = stored_prefix(held, next(iter(wanted), ""))
    for name, (shape, dtypes) in wanted.items():
        found, dtype = held.get(prefix + tail_of(name), (None, None))
        if found != shape or dtype not in dtypes:
            state = "is missing" if found is None else f"has shape {found} and dtype {dtype}"
            raise ValueError(f"corrupted checkpoint: {name} of shape {shape} {state} in {', '.join(files)}")


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
INTEGER_DTYPES = {torch.int8: ("I8",), torch.uint8: ("U8",)}


def tail_of(name: str) -> str:
    """The part of a parameter's name that no renaming changes: from `layers.` on."""
    return name[name.rindex("layers.") :] if "layers." in name else name


def stored_prefix(held: dict[str, object], name: str) -> str:
    """What stands before `layers.` in the file.

    A checkpoint saved from the causal model may be loaded as its base and the other way round, and some
    vision-language models store their decoder under another name than they give it in memory.
    """
    tail = tail_of(name)
    return next((key.removesuffix(tail) for key in held if key == tail or key.endswith(f".{tail}")), "")
