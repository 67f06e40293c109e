"""The fastest tiles of the decode kernels for given operands, by timing candidates on this device."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files import write_text
from ..kernels.tile_table import parse
from ..kernels.tiles import AnyTile, Tile, fixed_tile, tile_for
from .decode_operands import DecodeShape, Operands, random_operands
from .device_timing import Times, cold_times, input_sets


# What is tried of each field that a kernel reads; other fields are those of the tables.
TRIED = {
    "general": {"block_tokens": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "position_query": {"num_stages": (2, 3, 4, 6, 8), "heads": (1, 2)},
    "tile_reconstruction": {"num_stages": (4, 8), "heads": (1, 2, 4), "groups": (2, 3, 4), "chunk": (32, 64)},
}
# On the few tiles that are the fastest so far: factors of the split that the rule gives, or what the rule keeps to.
SPLIT_FACTORS = (0.25, 0.5, 2, 4)
SHORTEST_SPLITS = (128, 256, 512, 1024)
TILES_FOR_SPLITS = 3
# A tile whose result differs by more than rounding is not a tile of this kernel.
TOLERANCE = 2e-2


class Case(NamedTuple):
    """What to tune for: sizes, and the form of the cached numbers."""

    shape: DecodeShape
    code: str
    bits: int

    def keys(self) -> dict[str, Any]:
        """The keys of its entry in a table. Integer codes share one; that of fp8 names it."""
        shape = self.shape
        keys = {
            "head_dim": shape.head_dim,
            "bits": self.bits,
            "key_rank": shape.key_rank,
            "value_rank": shape.value_rank,
            "group": shape.query_heads // shape.kv_heads * shape.queries,
            "tokens": shape.tokens,
            "rows": shape.batch * shape.kv_heads,
        }
        return {**keys, "code": self.code} if self.code == "fp8" else keys


class Tuned(NamedTuple):
    """The fastest tile of a case, its time, and how many candidates ran."""

    kernel: str
    tile: AnyTile
    times: Times
    candidates: int


def tune_case(
    case: Case,
    attention: Callable[[Operands], Tensor],
    told: Callable[[str], None],
    device: torch.device | str = "cuda",
) -> Tuned:
    """Time all candidates for a case.

    Args:
        case: what to tune for.
        attention: runs the kernel.
        told: called with a line for every candidate that cannot be taken.
        device: a CUDA device.

    Raises:
        ValueError: no kernel with a tile table serves the case.
    """
    sets = [random_operands(case.shape, case.code, case.bits, device=device)]
    for _ in range(input_sets(sets[0].cache_bytes(), device) - 1):
        sets.append(random_operands(case.shape, case.code, case.bits, device=device))
    with fixed_tile(None) as asked:
        expected = attention(sets[0])
    if not asked:
        raise ValueError(f"no kernel with tiles serves {case.shape} in {case.bits} bits")
    kernel = asked[0]
    keys = case.keys()
    rows = keys.pop("rows")
    start = tile_for(kernel, **keys, batch=rows, kv_heads=1, device=expected.device)
    found: dict[AnyTile, Times] = {}
    seen: set[Hashable] = set()

    def take(tiles: Iterator[AnyTile]) -> None:
        for tile in tiles:
            if (same := effect(kernel, tile, case.shape, sets[0], expected.device)) in seen:
                continue
            seen.add(same)
            if (times := _timed(tile, sets, attention, expected, told)) is not None:
                found[tile] = times

    take(candidates(kernel, start))
    fastest = sorted(found, key=lambda tile: found[tile].median)[:TILES_FOR_SPLITS]
    take(with_other_splits(fastest, case.shape.tokens))
    best = min(found, key=lambda tile: found[tile].median)
    return Tuned(kernel, best, found[best], len(found))


def candidates(kernel: str, start: AnyTile) -> Iterator[AnyTile]:
    """`start`, then tiles of all sizes of the fields that `kernel` reads."""
    yield start
    fields = TRIED[kernel]
    for sizes in product(*fields.values()):
        tile = start._replace(**dict(zip(fields, sizes)))
        yield tile._replace(split_tokens=max(tile.split_tokens, tile.block_tokens)) if kernel == "general" else tile


def with_other_splits(tiles: Sequence[AnyTile], tokens: int) -> Iterator[AnyTile]:
    """The tiles with shorter and longer splits, as far as those make a difference at so many tokens."""
    for tile in tiles:
        if not isinstance(tile, Tile):
            yield from (tile._replace(shortest_split=split) for split in SHORTEST_SPLITS)
            continue
        for factor in SPLIT_FACTORS:
            split = int(tile.split_tokens * factor)
            if tile.block_tokens <= split < 2 * tokens:
                yield tile._replace(split_tokens=split)


def effect(kernel: str, tile: AnyTile, shape: DecodeShape, operands: Operands, device: torch.device) -> Hashable:
    """What a tile comes to: two of one effect are one launch, of which one is timed.

    Kernels for Hopper take of a tile what their registers, shared memory and the heads allow.
    """
    if kernel == "general":
        return tile
    from ..kernels.hopper_form import Form, side_of, tile_constants
    from ..kernels.hopper_launch import split_of

    group = shape.query_heads // shape.kv_heads
    form = Form(shape.head_dim, side_of(operands.part.key), side_of(operands.part.value), group)
    try:
        constants = tile_constants(kernel, form, tile, shape.kv_heads)
    except ValueError:
        return tile  # what is wrong with it is told where it is tried
    programs = shape.batch * shape.kv_heads // constants["HEADS"]
    return (*constants.items(), split_of(tile, shape.tokens, programs, device))


def _timed(
    tile: AnyTile,
    sets: Sequence[Operands],
    attention: Callable[[Operands], Tensor],
    expected: Tensor,
    told: Callable[[str], None],
) -> Times | None:
    """The time with a tile; None where it does not fit the device or the kernel."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    with fixed_tile(tile):
        try:
            got = attention(sets[0])
        except (CompilationError, OutOfResources, PTXASError, ValueError) as error:
            told(f"{tile}: {type(error).__name__}")
            return None
        difference = ((got - expected).float().norm() / expected.float().norm()).item()
        if not difference < TOLERANCE:
            told(f"{tile}: the result differs by {difference:.2g}")
            return None
        return cold_times([lambda operands=operands: attention(operands) for operands in sets])


class TableFile:
    """A table that grows by one case at a time; whole on disk after each.

    Raises ValueError for a file that is no table or one of another device.
    """

    def __init__(self, path: Path, device: torch.device | str = "cuda") -> None:
        properties = torch.cuda.get_device_properties(device)
        self.path = path
        self.content = {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "tiles": [],
        }
        if not path.exists():
            return
        try:
            existing = json.loads(path.read_text(encoding="utf-8"))
            rows = existing["tiles"]
            for index, row in enumerate(rows):
                parse(row, f"{path}: tiles[{index}]")
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{path} exists and is no tile table") from None
        if existing.get("device") != properties.name:
            raise ValueError(f"{path} is a table of {existing.get('device')!r}, this device is {properties.name!r}")
        self.content["tiles"] = rows

    def has(self, case: Case) -> bool:
        """Whether the case is in the file already."""
        keys = case.keys()
        return any({key: row.get(key) for key in keys} == keys for row in self.content["tiles"])

    def add(self, case: Case, tuned: Tuned) -> None:
        """Write a case's result, in place of an earlier one."""
        keys = case.keys()
        kept = [row for row in self.content["tiles"] if {key: row.get(key) for key in keys} != keys]
        row = {"kernel": tuned.kernel, **keys, **tuned.tile._asdict(), "ms": round(tuned.times.median, 5)}
        self.content["tiles"] = [*kept, row]
        lines = ",\n".join(f"    {json.dumps(row)}" for row in self.content["tiles"])
        head = json.dumps({**self.content, "tiles": None}, indent=2).replace("null", f"[\n{lines}\n  ]")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, head + "\n")
