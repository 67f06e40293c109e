"""Local JSON files as rows, read as they stand: `datasets` would decode strings that look like JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any


JSON_SUFFIXES = (".json", ".jsonl")
CONVERSATION_COLUMNS = {"messages", "conversations"}  # a JSON object with one of these alone is a row, no list of rows
SHUFFLE_BUFFER = 1000  # rows of a stream that are read ahead to choose from


class BrokenFile(ValueError):
    """A file that holds no rows; the text names file and line."""


class JsonLines:
    """The rows of a JSON Lines file, read anew line by line each time; empty lines count for nothing.

    Raises `BrokenFile` where it is iterated over and a line is no JSON object, or is no UTF-8.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open(encoding="utf-8-sig") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._row(line, number)
            except UnicodeDecodeError as error:
                raise BrokenFile(f"{self.label} is no UTF-8 text: {error}") from error

    def _row(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BrokenFile(f"{self.label}, line {number} is no JSON: {reason(error)}") from error
        if not isinstance(row, dict):
            raise BrokenFile(f"{self.label}, line {number}: a row must be a JSON object, got {type(row).__name__}")
        return row

    def shuffle(self, seed: int, buffer_size: int) -> Iterator[dict[str, Any]]:
        """The rows in an order given by `seed`: each is chosen from the next `buffer_size` of the file."""
        choice, rows = random.Random(seed), iter(self)
        buffer = list(islice(rows, buffer_size))
        for row in rows:
            place = choice.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = row
        choice.shuffle(buffer)
        yield from buffer


def json_rows(path: Path, label: str, streaming: bool) -> list[dict[str, Any]] | JsonLines:
    """The rows of a `.json` or `.jsonl` file as they stand in it; `JsonLines` for a `.jsonl` file to be streamed.

    A `.json` file holds a list of rows, an object whose only value is one, one row, or JSON Lines.

    Raises:
        BrokenFile: no JSON, a row that is no object, or no rows.
    """
    lines = JsonLines(path, label)
    if path.suffix.lower() == ".jsonl":
        if streaming:
            return lines
        rows = list(lines)
    else:
        rows = _json_list(path, label, lines)
    if not rows:
        raise BrokenFile(f"{label} holds no rows")
    return rows


def _json_list(path: Path, label: str, lines: JsonLines) -> list[dict[str, Any]]:
    """The rows of a `.json` file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        raise BrokenFile(f"{label} is no UTF-8 text: {error}") from error
    except RecursionError as error:
        raise BrokenFile(f"{label} is nested too deeply") from error
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):  # what follows a first object: JSON Lines
            raise BrokenFile(f"{label}, line {error.lineno} is no JSON: {error}") from error
        return list(lines)
    if isinstance(content, dict):
        (name, value), *others = list(content.items()) or [("", [])]
        alone = not others and isinstance(value, list) and name not in CONVERSATION_COLUMNS
        content = value if alone else [content]
    if not isinstance(content, list):
        raise BrokenFile(f"{label} must hold a list of rows, got {type(content).__name__}")
    for number, row in enumerate(content):
        if not isinstance(row, dict):
            line = _line_of(text, number)
            raise BrokenFile(f"{label}, line {line}: a row must be a JSON object, got {type(row).__name__}")
    return content


def _line_of(text: str, number: int) -> int:
    """The line on which an element of the first list in sound JSON starts."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    place = between.match(text, text.index("[") + 1).end()
    for _ in range(number):
        place = between.match(text, decoder.raw_decode(text, place)[1]).end()
    return text.count("\n", 0, place) + 1


def reason(error: BaseException) -> str:
    """The first line of the error that says what is wrong: of its cause, where `datasets` wraps one."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
