"""Images as data sets hold them: decoded, as bytes, as a path, an address or base64."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from transformers.image_utils import load_image


TIMEOUT = 60  # seconds for the download of one image


def to_image(value: Any, folder: Path | None) -> Image.Image:
    """An upright RGB image.

    Args:
        value: a Pillow image; bytes; `{"bytes": ..., "path": ...}` as `datasets` stores one; a `data:` or http
            address; or the path of a file.
        folder: what relative paths start from; None for data from elsewhere, whose paths mean nothing here.
    Raises:
        ValueError: none of these, no such file, or no image in it.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, Image.Image):
        return load_image(value)
    if isinstance(value, bytes):
        return load_image(_opened(io.BytesIO(value), f"{len(value)} bytes"))
    if not isinstance(value, str):
        raise ValueError(f"an image must be a picture, bytes, a path or an address, got {type(value).__name__}")
    if value.startswith(("http://", "https://", "data:image/")):
        return load_image(value, timeout=TIMEOUT)
    if folder is None:
        raise ValueError(f"the image path {value!r} leads nowhere: the data do not come from this machine")
    if not (folder / value).is_file():
        raise ValueError(f"there is no image file {value!r}")
    return load_image(_opened(folder / value, repr(value)))


def _opened(source: Any, name: str) -> Image.Image:
    try:
        return Image.open(source)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is no image that Pillow can read") from error
