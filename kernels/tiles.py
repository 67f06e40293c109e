"""Tile sizes of the decode kernels, looked up in tables of measurements: one JSON file a device.

The first table that knows the kernel decides: the file that `HF_WSVD_TILES` names, the user's own
(`hf-wsvd tune` writes it), the one shipped for the device, the one shipped for any device. Nothing is timed here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from .tile_table import TileTable, is_near, load, nearest


VARIABLE = "HF_WSVD_TILES"
SHIPPED = Path(__file__).parent / "tiles"
PROGRAMS_PER_MULTIPROCESSOR = 2
LONGEST_SPLIT = 8192
ASSUMED_MULTIPROCESSORS = 108  # of a device that does not tell, such as a CPU in the interpreter


class Tile(NamedTuple):
    """How the general decode kernel divides its work.

    Attributes:
        block_tokens: tokens that a program loads at a time.
        split_tokens: tokens that a program goes through; the same number in the kernel and in the merge of its splits.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
    """

    block_tokens: int
    split_tokens: int
    num_warps: int
    num_stages: int


class PositionQueryTile(NamedTuple):
    """How the position-query kernel divides its work.

    Attributes:
        num_stages: the most tiles of keys and values in shared memory; as many as fit.
        heads: KV heads that one program serves, where those of a part can be so divided.
        shortest_split: the fewest tokens of a sequence that are a program's.
    """

    num_stages: int
    heads: int = 1
    shortest_split: int = 512


class TileReconstructionTile(NamedTuple):
    """How the tile-reconstruction kernel divides its work.

    Attributes:
        num_stages, heads, shortest_split: see `PositionQueryTile`.
        groups: the most groups of four warps of a program; as many as their registers allow. A multiple of `heads`.
        chunk: the most rotary pairs of a tile that are worked at a time.
    """

    num_stages: int
    heads: int = 1
    shortest_split: int = 512
    groups: int = 2
    chunk: int = 64


AnyTile = Tile | PositionQueryTile | TileReconstructionTile
TILES = {"general": Tile, "position_query": PositionQueryTile, "tile_reconstruction": TileReconstructionTile}


def tile_for(
    kernel: str,
    *,
    head_dim: int,
    key_rank: int,
    value_rank: int,
    bits: int,
    group: int,
    tokens: int,
    batch: int,
    kv_heads: int,
    device: torch.device | str,
    code: str | None = None,
) -> AnyTile:
    """The tile to launch `kernel` with, of the kernel's own class.

    Args:
        kernel: "position_query", "tile_reconstruction", "general", ...
        head_dim: channels of a head.
        key_rank, value_rank: numbers stored of a key and of a value head.
        bits: of a stored number of the keys.
        group: query heads of a KV head times query tokens.
        tokens: room of the cache's tensors, in tokens: what the host knows without asking the device.
        batch: sequences.
        kv_heads: KV heads of the call.
        device: where the tensors are.
        code: of the stored numbers, see `StoredTokens`; None for any.

    Raises ValueError for a kernel that no table knows and for a broken table.
    """
    operands = {
        "head_dim": head_dim,
        "bits": bits,
        "code": code,
        "key_rank": key_rank,
        "value_rank": value_rank,
        "group": group,
        "tokens": 1 << max(tokens - 1, 15).bit_length(),  # a longer cache must not mean a new look-up every step
        "rows": batch * kv_heads,
    }
    if _fixed.asked is not None:
        _fixed.asked.append(kernel)
    if _fixed.tile is not None:
        return _fixed.tile
    return _tile_for(kernel, tuple(operands.items()), str(device), os.environ.get(VARIABLE))


class _Fixed:
    tile: AnyTile | None = None
    asked: list[str] | None = None


_fixed = _Fixed()


@contextmanager
def fixed_tile(tile: AnyTile | None) -> Iterator[list[str]]:
    """Have all kernels of all threads run with `tile` inside (None: as the tables say), for timing tiles.

    Yields the names of the kernels that ask for a tile, as they ask.
    """
    before = _fixed.tile, _fixed.asked
    _fixed.tile, _fixed.asked = tile, []
    try:
        yield _fixed.asked
    finally:
        _fixed.tile, _fixed.asked = before


@lru_cache(maxsize=4096)
def _tile_for(kernel: str, items: tuple[tuple[str, int | str | None], ...], device: str, named: str | None) -> AnyTile:
    operands = dict(items)
    name, multiprocessors = device_facts(device)
    for table in tables_of(name, named):
        found = nearest(table, kernel, operands)
        if found is None:
            continue
        sizes = dict(found.sizes)
        measured_here = table.multiprocessors in (None, multiprocessors) and is_near(found, operands)
        if kernel == "general" and ("split_tokens" not in sizes or not measured_here):
            sizes["split_tokens"] = split_tokens(
                operands["tokens"], operands["rows"], sizes["block_tokens"], multiprocessors
            )
        return TILES[kernel](**sizes)
    raise ValueError(f"kernel must be one that a tile table knows, got {kernel!r}; allowed: {', '.join(known(named))}")


def split_tokens(tokens: int, rows: int, block_tokens: int, multiprocessors: int) -> int:
    """Tokens of a split such that every multiprocessor has about two programs: a power of two.

    Args:
        tokens: of a sequence.
        rows: programs that there are without splitting.
        block_tokens: the least.
        multiprocessors: of the device.
    """
    splits = math.ceil(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors / rows)
    length = 1 << max(math.ceil(tokens / splits) - 1, 0).bit_length()
    return max(min(length, LONGEST_SPLIT), block_tokens)


@cache
def device_facts(device: str) -> tuple[str, int]:
    """Name of a device in the form of a file's name ("nvidia_h200"), and its number of multiprocessors."""
    if torch.device(device).type != "cuda":
        return torch.device(device).type, ASSUMED_MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(device)
    return file_name(properties.name), properties.multi_processor_count


def file_name(device_name: str) -> str:
    """ "NVIDIA H200" as "nvidia_h200"."""
    return "_".join("".join(letter if letter.isalnum() else " " for letter in device_name.lower()).split())


def user_table(device_name: str) -> Path:
    """Where the user's own table of a device lies; `device_name` as in `device_facts`."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "hf_wsvd" / "tiles" / f"{device_name}.json"


def tables_of(device_name: str, named: str | None = None) -> Iterator[TileTable]:
    """The tables for a device, the first to ask first.

    Raises ValueError for one that cannot be read, FileNotFoundError where `named` does not exist.
    """
    if named:
        yield load(Path(named))
    own = user_table(device_name)
    if own.is_file():
        yield load(own)
    shipped = shipped_table(device_name)
    if shipped is not None:
        yield load(shipped)
    yield load(SHIPPED / "default.json")


def shipped_table(device_name: str) -> Path | None:
    """The shipped table of a device: "nvidia_h100" serves "nvidia_h100_80gb_hbm3" as well."""
    words = device_name.split("_")
    for count in range(len(words), 0, -1):
        path = SHIPPED / f"{'_'.join(words[:count])}.json"
        if path.is_file():
            return path
    return None


def known(named: str | None = None) -> list[str]:
    """Names of the kernels in the table for any device and in `named`."""
    paths = [SHIPPED / "default.json", *([Path(named)] if named else [])]
    return sorted({entry.kernel for path in paths for entry in load(path).entries})
