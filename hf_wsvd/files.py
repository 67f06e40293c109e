"""Files and folders that appear whole or not at all."""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def check_output(target: Path, overwrite: bool) -> None:
    """Find out before any long work whether `target` can be written.

    Raises ValueError: not a folder, not empty without `overwrite`, or its parent cannot be written.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} exists and is no folder")
    if Path.cwd().is_relative_to(target.resolve()):
        raise ValueError(f"{target} is, or holds, the working directory; name a folder of its own")
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; pass --overwrite to replace it")
    _check_parent(target)


def check_output_file(target: Path, overwrite: bool) -> None:
    """Find out before any long work whether the file `target` can be written.

    Raises ValueError: a folder, there already without `overwrite`, or its parent cannot be written.
    """
    if target.is_dir():
        raise ValueError(f"{target} is a folder; name a file")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; pass --overwrite to replace it")
    _check_parent(target)


def _check_parent(target: Path) -> None:
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{target} cannot be written: no permission in {parent}")


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` to write into: takes the target's place at the end, is removed on errors."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o777 & ~_umask())  # mkdtemp's folders are private, an output folder is not
        yield partial
        if not target.exists():
            partial.rename(target)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent)) / target.name
        target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            old.rename(target)
            raise
        finally:
            shutil.rmtree(old.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replaced_file(path) as stream:
        stream.write(text.encode("utf-8"))


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary sibling of `path` to write into: takes its place at the end, is removed on errors."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # or a loss of power could leave the new name with no contents
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Remove what `replaced_file` left beside `path` when its process was killed while it wrote."""
    for stray in path.absolute().parent.glob(f".{glob.escape(path.name)}.partial-*"):
        stray.unlink(missing_ok=True)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
