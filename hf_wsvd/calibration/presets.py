"""Forms of calibration data by name: which columns each needs, and how it makes text or a conversation of a row."""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from .chat import Messages, Row, exchange
from .images import to_image


IMAGE_PROMPT = "Describe this image."
PLACEHOLDER = re.compile(r"<image>\n|\n?<image>")  # in a text of LLaVA's form, with the line break that sets it off
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
CHOICE_PROMPT = "Answer with the option's letter from the given choices directly."


class Unused(Exception):
    """A sound row that a calibration set leaves out; the text says why, to be read after "N rows"."""


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        images: whether the processor takes images.
        folder: what relative image paths start from; None where paths of this machine make no sense.
    """

    images: bool
    folder: Path | None

    def image(self, row: Row, column: str = "image") -> Any:
        """The column as an RGB image, or None where it is empty."""
        value = row.get(column)
        return None if value is None else to_image(value, self.folder)


@dataclass(frozen=True)
class Preset:
    """One form of rows.

    Attributes:
        needed: columns that must be there; alternatives are separated by `|`, the first that is there counts.
        optional: columns that are used when they are there.
        answers: what in a row gives tokens with labels, for warnings.
        convert: a row to a text, or to messages with content in parts; raises ValueError for a wrong row and `Unused`
            for one to leave out.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    answers: str
    convert: Callable[[Row, Reading], str | Messages]

    def fits(self, columns: Iterable[str]) -> bool:
        """Whether all that is needed is there."""
        found = set(columns)
        return all(found & set(need.split("|")) for need in self.needed)

    def columns(self) -> list[str]:
        """Every column it reads."""
        return [name for need in self.needed for name in need.split("|")] + list(self.optional)

    def requirement(self) -> str:
        """The columns in words."""
        needed = ", ".join(need.replace("|", " or ") for need in self.needed)
        return f"{needed} (optional: {', '.join(self.optional)})" if self.optional else needed


def choose_preset(preset: str | None, columns: Iterable[str]) -> str:
    """The name of the preset for these columns: the given one, else the first that fits.

    Raises ValueError that shows the columns found and what is needed.
    """
    columns = list(columns)
    if preset is not None:
        check_preset(preset)
        if PRESETS[preset].fits(columns):
            return preset
        wanted = f"preset {preset!r} needs {PRESETS[preset].requirement()}"
    else:
        for name, candidate in PRESETS.items():
            if candidate.fits(columns):
                return name
        wanted = "one of these is needed: " + "; ".join(f"{k}: {v.requirement()}" for k, v in PRESETS.items())
    raise ValueError(f"columns found: {', '.join(columns) or 'none'}; {wanted}; columns={{...}} gives them new names")


def check_preset(preset: str | None) -> None:
    """Raise ValueError for a name that is none of the presets'."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, or None to choose by columns; got {preset!r}")


def _text(row: Row, reading: Reading) -> str:
    text = "" if row.get("text") is None else _string(row, "text")
    if not text.strip():
        raise Unused("without text")
    return text


def _question(row: Row, reading: Reading) -> Messages:
    answer = None if row.get("answer") is None else _string(row, "answer")
    return exchange(_string(row, "question"), answer, reading.image(row))


def _image(row: Row, reading: Reading) -> Messages:
    image = reading.image(row)
    if image is None:
        raise Unused("without an image")
    caption = next((_string(row, name) for name in ("text", "caption") if row.get(name) is not None), None)
    return exchange(IMAGE_PROMPT, caption, image)


def _scienceqa(row: Row, reading: Reading) -> Messages:
    """The picture alone can answer most questions that have one, so models get the rows that they can see whole."""
    if reading.images and row.get("image") is None:
        raise Unused("without an image")
    if not reading.images and row.get("image") is not None:
        raise Unused("with an image, which a tokenizer cannot take")
    choices, answer = row.get("choices"), row.get("answer")
    letters = string.ascii_uppercase
    if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= len(letters):
        raise ValueError(f"choices must be a list of 1 to {len(letters)}, got {choices!r}")
    if answer is not None and (not isinstance(answer, Integral) or not 0 <= answer < len(choices)):
        raise ValueError(f"answer must be the index of one of {len(choices)} choices, got {answer!r}")
    hint = row.get("hint")
    lines = [f"Context: {hint}"] if hint else []
    lines += [_string(row, "question")]
    lines += [f"{letter}. {choice}" for letter, choice in zip(letters, choices)]
    letter = None if answer is None else letters[answer]
    return exchange("\n".join([*lines, CHOICE_PROMPT]), letter, reading.image(row))


def _messages(row: Row, reading: Reading) -> Messages:
    column = "messages" if row.get("messages") is not None else "conversations"
    turns = row.get(column)
    if not isinstance(turns, list | tuple) or not turns:
        raise ValueError(f"{column} must be a list of messages that is not empty, got {turns!r}")
    given = row.get("images") if row.get("images") is not None else row.get("image")
    given = given if isinstance(given, list | tuple) else [] if given is None else [given]
    images = iter([partial(to_image, value, reading.folder) for value in given])
    messages = [_message(turn, f"{column}[{number}]", images, reading) for number, turn in enumerate(turns)]
    left = [{"type": "image", "image": image()} for image in images]
    placed = any(part["type"] == "image" for message in messages for part in message["content"])
    if left and placed:
        raise ValueError(f"{len(given)} images in the row, {len(given) - len(left)} placeholders in its {column}")
    if left:
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = [*left, *first["content"]]
    return messages


def _message(turn: Any, place: str, images: Iterator[Callable], reading: Reading) -> dict[str, Any]:
    if isinstance(turn, Mapping) and turn.get("role") is None and turn.get("from") is not None:
        turn = _of_llava(turn, place)
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        found = ", ".join(map(str, turn)) if isinstance(turn, Mapping) else type(turn).__name__
        raise ValueError(
            f"{place} needs role and content, as chat templates take them, or from and value; found {found}"
        )
    # Tables fill what a message lacks with None; templates ask whether a name is there at all.
    message = {name: value for name, value in turn.items() if value is not None}
    content = message.get("content", "")
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}] if content else []
    elif isinstance(content, list | tuple):
        parts = [_part(part, place, images, reading) for part in content]
    else:
        raise ValueError(f"the content of {place} must be a string or a list of parts, got {type(content).__name__}")
    return {**message, "content": parts}


def _of_llava(turn: Row, place: str) -> dict[str, Any]:
    """A message `{"from": ..., "value": "<image> ..."}` with role and content; its images are yet to be filled in."""
    speaker, text = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(f"{place} must be from one of {', '.join(SPEAKERS)}, got {speaker!r}")
    if not isinstance(text, str):
        raise ValueError(f"the value of {place} must be a string, got {type(text).__name__}")
    first, *others = PLACEHOLDER.split(text)
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return {"role": SPEAKERS[speaker], "content": [part for part in parts if part.get("text") != ""]}


def _part(part: Any, place: str, images: Iterator[Callable], reading: Reading) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"a part of {place} must have type text, with a text, or type image; got {part!r}")
    value = next((part[name] for name in ("image", "url", "path", "image_url") if part.get(name) is not None), None)
    if value is None and part.get("base64") is not None:
        value = f"data:image/png;base64,{part['base64']}"  # Pillow goes by the contents, whatever the type says
    if isinstance(value, Mapping) and isinstance(value.get("url"), str):
        value = value["url"]
    if value is None:
        try:
            return {"type": "image", "image": next(images)()}
        except StopIteration:
            raise ValueError(
                f"{place} has an image without path, address or bytes, and the row has none left"
            ) from None
    return {"type": "image", "image": to_image(value, reading.folder)}


def _string(row: Row, column: str) -> str:
    value = row.get(column)
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{column} must be a string, got {type(value).__name__}")


# In the order in which columns are tried: what needs more goes first.
PRESETS = {
    "messages": Preset(
        ("messages|conversations",),
        ("image", "images"),
        "an assistant's message in the column messages or conversations, after a user's",
        _messages,
    ),
    "scienceqa": Preset(("question", "choices", "answer"), ("image", "hint"), "the column answer", _scienceqa),
    "question": Preset(("question", "answer"), ("image",), "the column answer", _question),
    "image": Preset(
        ("image",), ("text", "caption"), "a column text or caption (metadata.jsonl in a folder of images)", _image
    ),
    "text": Preset(("text",), (), "the column text", _text),
}
