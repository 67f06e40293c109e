"""Checks of a compressed checkpoint's files before anything is allocated."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open

from .surgery import Target


def check_checkpoint(files: list[str] | None, targets: list[Target]) -> None:
    """Compare names and shapes in the safetensors headers with the factors that the config promises.

    transformers would fill missing tensors with random numbers; here a lost factor is an error.

    Raises:
        ValueError: a file that cannot be read (truncated, not safetensors), or a factor that is missing or of
            another shape.
    """
    if not files:
        return  # weights given as a state dict
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, a safetensors handle is no mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a readable safetensors file (truncated or corrupted?): {error}"
            ) from error
    for target in targets:
        # A checkpoint saved from the causal model may be loaded as its base and the other way round, and some
        # vision-language models store their decoder under another prefix: compare from `layers.` on.
        for side, _, projection in target.sides():
            name = target.attention.side_name(side)
            tail = name[name.rindex("layers.") :] if "layers." in name else name
            for parameter, tensor in projection.named_parameters():
                wanted = f"{tail}.{parameter}"
                found = [shape for key, shape in shapes.items() if key == wanted or key.endswith(f".{wanted}")]
                if tuple(tensor.shape) not in found:
                    state = f"has shape {found[0]}" if found else "is missing"
                    raise ValueError(
                        f"corrupted checkpoint: {name}.{parameter} of shape {tuple(tensor.shape)} {state} in "
                        f"{', '.join(files)}"
                    )
