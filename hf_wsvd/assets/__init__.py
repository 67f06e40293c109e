"""Files that ship with the package: the emoji tiles and the embedded demo model."""

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """Folder of the embedded LLaVA checkpoint, ready for `from_pretrained`."""
    return Path(str(files(__name__) / "demo_model"))


def tiles_path() -> Path:
    """File of the emoji tiles: `tiles` uint8 [names, styles, rgba, 42, 42], `names`, `styles`."""
    return Path(str(files(__name__) / "tiles42.npz"))
