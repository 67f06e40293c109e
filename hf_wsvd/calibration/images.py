"""Images as data sets hold them: decoded, as bytes, as a path, an address or base64."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
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
    name = "the image"
    if isinstance(value, str):
        name = f"the image {value[:100]!r}"
        if not value.startswith(("http://", "https://", "data:image/")):
            value = _local_file(value, folder)
    elif not isinstance(value, Image.Image | bytes):
        raise ValueError(f"an image must be a picture, bytes, a path or an address, got {type(value).__name__}")
    try:
        if isinstance(value, bytes | Path):
            value = Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
        return load_image(value, timeout=TIMEOUT)
    except Exception as error:  # of Pillow, for broken or oversized images, or of the download
        raise ValueError(f"{name} cannot be read: {error}") from error


def _local_file(path: str, folder: Path | None) -> Path:
    """The file at `path`, seen from `folder`."""
    if folder is None:
        raise ValueError(f"the image path {path!r} leads nowhere: the data do not come from this machine")
    if not (folder / path).is_file():
        raise ValueError(f"there is no image file {path!r}")
    return folder / path
