"""`GuardMap`: which physical KV heads keep more precision than the rest (HeadGuard, arXiv 2609.35800)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


GUARD_BITS = (16, 8, 4, 3)
TOKEN_CLASSES = ("image", "all")
SIDES = ("key", "value")
MOST_LAYERS, MOST_HEADS = 4096, 4096


class Guard(NamedTuple):
    """One side of one physical head that is guarded, and its bits."""

    layer: int
    head: int
    side: str
    bits: int


@dataclass
class GuardMap:
    """The guarded heads of one decoder.

    Args:
        key, value: decoder layer to guarded head to the bits that its tokens are kept in: 16 (the model's dtype), 8, 4
            or 3.
        num_key_value_heads: physical heads of every decoder layer, 0 for one without keys and values; what the map
            fits.
        tokens: "image" (tokens of images and videos) or "all".
        selector: how the heads were chosen.
        scores: side to a score for each head of each layer, the larger the more it needs guarding; kept for the heat
            map.
        info: how the scores came about (options, calibration data); JSON-safe.

    Raises:
        ValueError: naming the field, the value given and what is allowed.
    """

    key: dict[int, dict[int, int]] = field(default_factory=dict)
    value: dict[int, dict[int, int]] = field(default_factory=dict)
    num_key_value_heads: list[int] = field(default_factory=list)
    tokens: str = "image"
    selector: str | None = None
    scores: dict[str, list[list[float]]] | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        heads = self.num_key_value_heads
        right = isinstance(heads, list | tuple) and 0 < len(heads) <= MOST_LAYERS
        if not (right and all(type(count) is int and 0 <= count <= MOST_HEADS for count in heads)):
            fail("num_key_value_heads", heads, "a list with the number of KV heads of every decoder layer")
        self.num_key_value_heads = list(heads)
        if self.tokens not in TOKEN_CLASSES:
            fail("tokens", self.tokens, f"one of {TOKEN_CLASSES}")
        if self.selector is not None and not isinstance(self.selector, str):
            fail("selector", self.selector, "a name or None")
        if not isinstance(self.info, dict):
            fail("info", self.info, "a dict")
        for side in SIDES:
            setattr(self, side, self._side(side, getattr(self, side)))
        self._check_scores()

    @classmethod
    def parse(cls, value: GuardMap | dict[str, Any] | str | PathLike[str] | None) -> GuardMap | None:
        """A map, its dict form, or the path of a JSON file of it.

        Raises:
            ValueError: anything else, unknown keys, or a file that is no such JSON.
            FileNotFoundError: there is no such file.
        """
        if value is None or isinstance(value, GuardMap):
            return value
        if isinstance(value, str | PathLike):
            try:
                loaded = json.loads(Path(value).read_text(encoding="utf-8"))
            except (ValueError, RecursionError, IsADirectoryError) as error:
                raise ValueError(f"GuardMap: {value} is no JSON file: {error}") from error
            value = loaded
        if not isinstance(value, dict):
            fail("GuardMap", value, "a GuardMap, a dict of its fields, or the path of a JSON file")
        known = [entry.name for entry in dataclasses.fields(cls)]
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(f"GuardMap: unknown field(s) {unknown!r:.200}; allowed: {known}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """JSON form (layer and head numbers are strings there), without what is empty."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        for side in SIDES:
            fields[side] = {
                str(layer): {str(head): bits for head, bits in heads.items()} for layer, heads in fields[side].items()
            }
        return {name: value for name, value in fields.items() if value not in (None, {})}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON form."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __iter__(self) -> Iterator[Guard]:
        for side in SIDES:
            for layer, heads in getattr(self, side).items():
                for head, bits in heads.items():
                    yield Guard(layer, head, side, bits)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def groups(self, side: str, layer: int) -> list[tuple[int, tuple[int, ...]]]:
        """(bits, sorted heads) of one side of a layer, most bits first."""
        heads = getattr(self, side).get(layer, {})
        return [
            (bits, tuple(sorted(head for head, own in heads.items() if own == bits)))
            for bits in sorted(set(heads.values()), reverse=True)
        ]

    def check_fits(self, num_key_value_heads: list[int], model: str) -> None:
        """Raise ValueError unless the map is for a decoder with so many heads in its layers, that of `model`."""
        if self.num_key_value_heads != list(num_key_value_heads):
            raise ValueError(
                f"the guard map was made for another model: a decoder of {described(self.num_key_value_heads)}; "
                f"{model} has {described(num_key_value_heads)}"
            )

    def _side(self, side: str, given: Any) -> dict[int, dict[int, int]]:
        allowed = f"a dict of layer to a dict of KV head to bits, one of {GUARD_BITS}"
        if not isinstance(given, dict) or not all(isinstance(heads, dict) for heads in given.values()):
            fail(side, given, allowed)
        found = {}
        for layer, heads in given.items():
            number = self._number(side, layer, len(self.num_key_value_heads), "decoder layers")
            count = self.num_key_value_heads[number]
            found[number] = {self._number(f"{side}[{number}]", h, count, "KV heads"): b for h, b in heads.items()}
            if len(found[number]) < len(heads):
                fail(f"{side}[{number}]", heads, "each KV head once")
            for head, bits in found[number].items():
                if type(bits) is not int or bits not in GUARD_BITS:
                    fail(f"{side}[{number}][{head}]", bits, f"bits, one of {GUARD_BITS}")
        if len(found) < len(given):
            fail(side, given, "each decoder layer once")
        return {layer: dict(sorted(heads.items())) for layer, heads in sorted(found.items()) if heads}

    def _number(self, field_name: str, value: Any, count: int, what: str) -> int:
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 6:
            value = int(value)
        if type(value) is not int or not 0 <= value < count:
            fail(field_name, value, f"{what} from 0 to {count - 1}" if count else f"no {what}: the layer has none")
        return value

    def _check_scores(self) -> None:
        if self.scores is None:
            return
        if not isinstance(self.scores, dict) or not set(self.scores) <= set(SIDES):
            fail("scores", self.scores, f"a dict with keys of {SIDES}")
        for side, rows in self.scores.items():
            lengths = [len(row) for row in rows] if isinstance(rows, list) and all(map(is_list, rows)) else None
            if lengths != self.num_key_value_heads:
                fail(f"scores[{side!r}]", rows, "a list of scores, one a KV head, for every decoder layer")
            if not all(is_score(x) for row in rows for x in row):
                fail(f"scores[{side!r}]", rows, "numbers")


def is_score(value: Any) -> bool:
    """Whether it is a number, infinite or of the size of a float; JSON has integers of any size."""
    if isinstance(value, float):
        return value == value
    return type(value) is int and abs(value) < 2**1023


def is_list(value: Any) -> bool:
    """Whether JSON would write it as an array."""
    return isinstance(value, list | tuple)


def described(heads: list[int]) -> str:
    """Layers and heads for a message."""
    counts = sorted(set(heads))
    return f"{len(heads)} layers of {' or '.join(map(str, counts))} KV heads"


def fail(field_name: str, value: Any, allowed: str) -> NoReturn:
    """The form of this file's errors."""
    raise ValueError(f"GuardMap: {field_name}={value!r:.200} is not allowed; allowed: {allowed}")
