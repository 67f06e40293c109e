"""Checks of configuration values: each failure names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any, NoReturn


def fail(field: str, value: Any, allowed: str) -> NoReturn:
    """Raise the package's one form of configuration error."""
    raise ValueError(f"WSVDConfig: {field}={value!r} is not allowed; allowed: {allowed}")


def check_int(field: str, value: Any, low: int, high: int | None) -> None:
    """`low <= value`, and `value <= high` unless `high` is None."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        fail(field, value, allowed)


def check_number(field: str, value: Any, low: float, high: float) -> None:
    """A finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        fail(field, value, f"a number from {low:g} to {high:g}")


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of `choices`."""
    if not isinstance(value, str) or value not in choices:
        fail(field, value, "one of " + ", ".join(map(repr, choices)))


def check_ratio(field: str, value: Any) -> None:
    """A ratio in (0, 1], a list of them (None keeps a layer whole), or None."""
    entries = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        number = not isinstance(entry, bool) and isinstance(entry, int | float)
        if entry is not None and not (number and 0 < entry <= 1):
            fail(field, value, "a number in (0, 1], a list of them (or None) with one a decoder layer, or None")
    if not entries:
        fail(field, value, "a number in (0, 1], or a list with one entry a decoder layer")


def check_ranks(field: str, value: Any) -> None:
    """A positive integer, a list of them (None keeps a layer whole), or None."""
    allowed = "an integer from 1 to head_dim, a list of them (or None) with one a decoder layer, or None"
    if value is None:
        return
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        fail(field, value, allowed)
    for entry in entries:
        if entry is None and isinstance(value, list | tuple):
            continue
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 1:
            fail(field, value, allowed)


def check_heads_by_layer(field: str, value: Any) -> None:
    """A list with sorted heads (or None) for each decoder layer, or None."""
    if value is None:
        return
    rows = value if isinstance(value, list | tuple) else [0]
    for row in rows:
        heads = row if isinstance(row, list | tuple) else [-1]
        sound = all(type(head) is int and head >= 0 for head in heads) and list(heads) == sorted(set(heads))
        if not (row is None or sound):
            fail(field, value, "a list with the sorted heads (or None) of every decoder layer, or None")


def check_names(field: str, value: Any) -> None:
    """A list of non-empty strings, or None."""
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        fail(field, value, "a list of module names")
