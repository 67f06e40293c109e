"""Checks of a compressed checkpoint's files before anything is allocated."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open

from .targets import Target


def check_checkpoint(files: list[str] | None, targets: list[Target]) -> None:
    """Compare names and shapes in the safetensors headers with the factors that the config promises.

    transformers would fill missing tensors with random numbers; here a lost factor is an error.

    Raises:
        ValueError: a file that cannot be read (truncated, not safetensors), or a factor that is missing or of
            another shape.
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
        f"{target.attention.side_name(side)}.{parameter}": tuple(tensor.shape)
        for target in targets
        for side, _, projection in target.sides()
        for parameter, tensor in projection.named_parameters()
    }
    prefix = stored_prefix(held, next(iter(wanted), ""))
    for name, shape in wanted.items():
        found, dtype = held.get(prefix + tail_of(name), (None, None))
        if found != shape or dtype not in FLOAT_DTYPES:
            state = "is missing" if found is None else f"has shape {found} and dtype {dtype}"
            raise ValueError(f"corrupted checkpoint: {name} of shape {shape} {state} in {', '.join(files)}")


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


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
