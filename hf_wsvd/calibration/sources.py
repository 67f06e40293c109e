"""Where calibration data come from: the Hub, a folder, a file or memory.

`datasets` is imported where it opens a data set. A list of rows and plain text need none, and JSON files are read
here: `datasets` would decode strings such as "2" or "null" once a column mixes strings with lists.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .json_rows import JSON_SUFFIXES, SHUFFLE_BUFFER, BrokenFile, JsonLines, json_rows, reason


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    Source = str | os.PathLike[str] | Dataset | DatasetDict | IterableDataset | IterableDatasetDict | Sequence[Mapping]

BUILDERS = {".parquet": "parquet", ".csv": "csv"}
TEXT_SUFFIX = ".txt"
FILE_SUFFIXES = (*JSON_SUFFIXES, *BUILDERS, TEXT_SUFFIX)


@dataclass(frozen=True)
class Rows:
    """An opened data set.

    Attributes:
        rows: a list, `Dataset`, `IterableDataset` or `JsonLines` of mappings.
        label: what errors call it.
        record: `dataset`, `dataset_name` and `split`, as far as they are known, free of local paths.
        folder: what relative image paths start from; None for data from the Hub.
    """

    rows: Any
    label: str
    record: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def columns(self) -> list[str]:
        """Column names: those of any row of a list, and of the first rows of a stream of JSON.

        Raises ValueError for a set without rows, or whose first row is no mapping.
        """
        names = getattr(self.rows, "column_names", None)
        if not names or (hasattr(self.rows, "__len__") and not len(self.rows)):
            looked_at = len(self.rows) if isinstance(self.rows, list) else 1
            if isinstance(self.rows, JsonLines):
                looked_at = SHUFFLE_BUFFER
            try:
                first = list(islice(self.rows, looked_at))
            except BrokenFile:
                raise
            except Exception as error:
                raise ValueError(f"{self.label} cannot be read: {reason(error)}") from error
            if not first:
                raise ValueError(f"{self.label} holds no rows")
            if not isinstance(first[0], Mapping):
                raise ValueError(f"the rows of {self.label} must be mappings, got {type(first[0]).__name__}")
            names = list(dict.fromkeys(name for row in first if isinstance(row, Mapping) for name in row))
        return names

    def shuffled(self, seed: int, columns: Iterable[str], limit: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """At most `limit` rows with their numbers, in an order given by `seed`; only `columns` are decoded.

        Numbers of a stream's rows count in the order of reading, as theirs are not known.

        Raises ValueError naming the row that cannot be read.
        """
        rows = self.rows
        if hasattr(rows, "with_format"):
            rows = rows.with_format(None)  # tensors and arrays are no images to the readers of rows
        if getattr(rows, "column_names", None):
            rows = rows.select_columns([name for name in rows.column_names if name in set(columns)])
        if hasattr(rows, "__len__"):
            numbers = random.Random(seed).sample(range(len(rows)), min(limit, len(rows)))
            read = map(rows.__getitem__, numbers)
        else:
            numbers = range(limit)
            read = iter(rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))
        for number in numbers:
            try:
                row = next(read)
            except StopIteration:
                return
            except BrokenFile:
                raise
            except Exception as error:  # whatever the reader of that format raises
                raise ValueError(f"{self.label}, row {number} cannot be read: {reason(error)}") from error
            yield number, row


def plain_text(source: Any) -> tuple[str, Path] | None:
    """The text and place of a `.txt` file, or of a folder whose data are all `.txt` files (joined, by name).

    Raises ValueError for bytes that are no UTF-8.
    """
    path = local_path(source)
    if path is None:
        return None
    files = []
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and not file.name.startswith("."):
            if file.suffix.lower() != TEXT_SUFFIX:
                return None
            files.append(file)
    if not files:
        return None
    try:
        return "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(files)), path
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no UTF-8 text: {error}") from error


def local_path(source: Any) -> Path | None:
    """The file or folder that `source` names, None if it is none.

    Raises FileNotFoundError for what can only be a path, and is not there.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(source).expanduser()
    if path.exists():
        return path
    try:
        validate_repo_id(os.fspath(source))
        on_hub = isinstance(source, str) and path.suffix.lower() not in FILE_SUFFIXES
    except HFValidationError:
        on_hub = False
    if not on_hub:
        raise FileNotFoundError(f"there is no file or folder {os.fspath(source)}, and it is no repository's name")
    return None


def open_rows(source: Source, *, split: str, name: str | None = None, streaming: bool = False) -> Rows:
    """Open a data set without reading its rows.

    Args:
        source: a Hub id; a folder, as `save_to_disk` writes or `load_dataset` reads one; a `.json`, `.jsonl`,
            `.parquet` or `.csv` file; or what is in memory: `Dataset`, `IterableDataset`, a dict of them, a list of
            rows.
        name: the configuration of a Hub or folder data set that has several.
    Raises:
        ValueError: what does not load, has no such split, or is no data.
        FileNotFoundError: a path that is not there.
    """
    if not isinstance(source, str | os.PathLike):
        return _in_memory(source, split, name)
    path = local_path(source)
    label = os.fspath(source)
    record = {"dataset": label if path is None else path.resolve().name}
    if path is not None and path.is_file():
        if path.suffix.lower() not in FILE_SUFFIXES:
            raise ValueError(f"{label}: calibration files end in {', '.join(FILE_SUFFIXES)}")
        if name is not None:
            raise ValueError(f"{label} is one file and has no configuration; got name={name!r}")
        if split != "train":
            raise ValueError(f"{label} is one file and has the split 'train' alone; got split={split!r}")
        if path.suffix.lower() in JSON_SUFFIXES:
            return Rows(json_rows(path, label, streaming), label, {**record, "split": split}, path.parent)
    import datasets

    if path is not None and any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        try:
            saved = datasets.load_from_disk(str(path))
        except Exception as error:
            raise ValueError(f"{label} does not load: {reason(error)}") from error
        opened = _in_memory(saved, split, name, label)
        return Rows(opened.rows, label, {**record, **opened.record}, path)
    options: dict[str, Any] = {"path": label if path is None else str(path), "name": name}
    folder = path
    if path is not None and path.is_file():
        options = {"path": BUILDERS[path.suffix.lower()], "data_files": str(path)}
        folder = path.parent
    try:
        rows = datasets.load_dataset(**options, split=split, streaming=streaming)
    except Exception as error:  # of datasets, pyarrow, the Hub's client or the file system
        raise ValueError(f"{label} does not load: {reason(error)}") from error
    return Rows(rows, label, {**record, **({"dataset_name": name} if name else {}), "split": split}, folder)


def _in_memory(source: Any, split: str, name: str | None, label: str = "the data in memory") -> Rows:
    """Rows that need no loading."""
    if name is not None:
        raise ValueError(f"{label} has no configuration; got name={name!r}")
    if isinstance(source, Mapping):  # a DatasetDict is one
        if split not in source:
            raise ValueError(f"{label} has no split {split!r}; it has {', '.join(map(str, source)) or 'none'}")
        return Rows(source[split], label, {"split": split}, Path())
    known = isinstance(source, Sequence) and not isinstance(source, bytes)
    if not known:
        import datasets

        known = isinstance(source, datasets.Dataset | datasets.IterableDataset)
    if not known:
        raise ValueError(
            "source must be a Hub id, a file, a folder, a Dataset, an IterableDataset or a list of rows, got "
            f"{type(source).__name__}"
        )
    if split != "train":
        raise ValueError(f"{label} has no splits; got split={split!r}")
    return Rows(source, label, {}, Path())
