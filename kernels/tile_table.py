"""The file form of a tile table: entries of operands and the sizes that were the fastest for them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


# Keys of an entry: these must be equal where the entry gives them ...
EXACT = ("head_dim", "bits", "code")
# ... and of these the nearest counts, by the logarithm of their ratio. `rows` are sequences times KV heads.
NEAREST = ("key_rank", "value_rank", "group", "tokens", "rows")
# A key that the entry leaves open stands for anything, as far away as two doublings.
OPEN_KEY = 2.0

_STAGES = (1, 8, False)
_HOPPER = {"num_stages": _STAGES, "heads": (1, 4, True), "shortest_split": (64, 1 << 20, True)}
SIZES = {  # fields of a kernel's tile: (smallest, largest, whether a power of two)
    "general": {
        "block_tokens": (16, 512, True),
        "split_tokens": (16, 1 << 20, True),
        "num_warps": (1, 16, True),
        "num_stages": _STAGES,
    },
    "position_query": {**_HOPPER, "heads": (1, 2, True)},
    "tile_reconstruction": {**_HOPPER, "groups": (2, 4, False), "chunk": (32, 64, True)},
}


class Entry(NamedTuple):
    """One row of a table: for which operands (`keys`) which `sizes` were the fastest."""

    kernel: str
    keys: dict[str, Any]
    sizes: dict[str, int]


class TileTable(NamedTuple):
    """A file of entries, checked.

    Attributes:
        entries: in the file's order.
        multiprocessors: of the device that they were measured on, or None.
    """

    entries: tuple[Entry, ...]
    multiprocessors: int | None


@cache
def load(path: Path) -> TileTable:
    """Read and check a table.

    Raises ValueError, naming the file and the entry, for JSON or values that do not fit.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a tile table, not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("tiles"), list):
        raise ValueError(f'{path}: not a tile table: must be an object with a list "tiles"')
    multiprocessors = content.get("multiprocessors")
    if multiprocessors is not None and not _is_count(multiprocessors):
        raise ValueError(f"{path}: multiprocessors must be a whole number of at least 1, got {multiprocessors!r}")
    entries = [parse(row, f"{path}: tiles[{index}]") for index, row in enumerate(content["tiles"])]
    return TileTable(tuple(entries), multiprocessors)


def parse(row: Any, where: str) -> Entry:
    """One entry of a table, checked. Raises ValueError that starts with `where`."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, got {row!r}")
    kernel = row.get("kernel")
    if not isinstance(kernel, str) or kernel not in SIZES:
        raise ValueError(f"{where}.kernel must be one of {', '.join(SIZES)}, got {kernel!r}")
    known_fields = {"kernel", *EXACT, *NEAREST, *SIZES[kernel], "ms"}
    if unknown := sorted(row.keys() - known_fields):
        raise ValueError(
            f"{where} has unknown fields {', '.join(unknown)}; allowed for {kernel}: {', '.join(sorted(known_fields))}"
        )
    keys = {key: row[key] for key in (*EXACT, *NEAREST) if row.get(key) is not None}
    for key, value in keys.items():
        if key == "code" and not isinstance(value, str):
            raise ValueError(f"{where}.code must be a name, got {value!r}")
        if key != "code" and not _is_count(value):
            raise ValueError(f"{where}.{key} must be a whole number of at least 1, got {value!r}")
    sizes = {}
    for field, (least, most, power) in SIZES[kernel].items():
        value = row.get(field)
        if value is None and field == "split_tokens":
            continue
        if not _is_count(value) or not least <= value <= most or (power and value & (value - 1)):
            kind = "a power of two" if power else "a whole number"
            raise ValueError(f"{where}.{field} must be {kind} from {least} to {most}, got {value!r}")
        sizes[field] = value
    if sizes.get("split_tokens", math.inf) < sizes.get("block_tokens", 0):
        allowed = f"at least block_tokens ({sizes['block_tokens']})"
        raise ValueError(f"{where}.split_tokens must be {allowed}, got {sizes['split_tokens']}")
    return Entry(kernel, keys, sizes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def nearest(table: TileTable, kernel: str, operands: dict[str, Any]) -> Entry | None:
    """The entry for `kernel` whose keys are the closest to `operands`; None if none fits. Ties: the first."""
    fitting = [
        entry
        for entry in table.entries
        if entry.kernel == kernel and all(entry.keys.get(key, operands[key]) == operands[key] for key in EXACT)
    ]
    return min(fitting, key=lambda entry: _distance(entry, operands), default=None)


def _distance(entry: Entry, operands: dict[str, Any]) -> float:
    open_keys = sum(key not in entry.keys for key in EXACT)
    return OPEN_KEY * open_keys + sum(_octaves(entry, operands, key) for key in NEAREST)


def _octaves(entry: Entry, operands: dict[str, Any], key: str) -> float:
    if key not in entry.keys:
        return OPEN_KEY
    return abs(math.log2(entry.keys[key] / operands[key]))


def is_near(entry: Entry, operands: dict[str, Any]) -> bool:
    """Whether the split that was measured fits: a split for other numbers of programs leaves the device idle."""
    return all(key in entry.keys and _octaves(entry, operands, key) <= 1 for key in ("tokens", "rows"))
