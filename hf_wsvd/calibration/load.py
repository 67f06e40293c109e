"""`load_calibration`: any data set to model inputs with labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers.utils import logging

from .batches import IGNORED, Batch, CalibrationSet
from .chat import Messages, chat_sequence
from .json_rows import reason
from .presets import PRESETS, Reading, Unused, check_preset, choose_preset
from .sources import open_rows, plain_text
from .text import text_windows


if TYPE_CHECKING:
    from .sources import Source

TEXT_TOKENS = 512
CHAT_TOKENS = 4096  # a picture alone may take some thousand
ROWS_A_SEQUENCE = 20  # looked at for each sequence wanted: a set without usable rows is not read to its end

logger = logging.get_logger(__name__)


def load_calibration(
    source: Source,
    processor: Any,
    *,
    preset: str | None = None,
    split: str = "train",
    name: str | None = None,
    samples: int = 64,
    max_tokens: int | None = None,
    seed: int = 0,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> CalibrationSet:
    """`samples` sequences of a data set as calibration data, on the CPU; the same arguments give the same set.

    Every batch is one sequence: `input_ids`, `attention_mask` and `labels` int64 `[1, S]`, and the pixel inputs of the
    processor. Labels hold the answers' tokens (every assistant turn, with its end-of-turn token), or all tokens of
    plain text but a BOS, and -100 elsewhere. A row without an answer is used with no token labelled; calibration needs
    at least one that has an answer, so a set without any gives a warning, as does one without images for a processor
    that takes them.

    Rows are chosen at random by `seed`; at most 20 are looked at for each sequence wanted. Rows that cannot be used
    (longer than `max_tokens`, without text, without an image where the preset needs one) are left out, with a warning
    that counts them.

    Args:
        source: a Hub id; a folder (of `save_to_disk`, or of Parquet, JSON, text or image files); a `.json`, `.jsonl`,
            `.parquet`, `.csv` or `.txt` file; a `datasets` object; a list of rows. `.txt` files are read as one text
            and give windows at even distances, no two of them the same.
        processor: the model's processor (images and text) or tokenizer (text).
        preset: "messages", "scienceqa", "question", "image" or "text", see docs/calibration.md; None takes the first
            of them that the columns fit.
        split: of a data set that has splits.
        name: the configuration of a data set that has several.
        samples: sequences to return; fewer, with a warning, where the data do not hold as many.
        max_tokens: text is cut there, longer conversations are left out (a cut could fall into an image); None
            stands for 512 and 4096.
        streaming: read rows as they come, from a shuffled buffer of 1000, in place of a download of the whole set.
        columns: a preset's column to the name that the data set gives it, such as `{"question": "query"}`.
    Raises:
        ValueError: columns that fit no preset, an unknown preset, split or configuration, data that do not load, a row
            or image that cannot be read, a processor without what the rows need, or no sequence left.
        FileNotFoundError: a path that is not there.
    """
    if samples < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"samples and max_tokens must be at least 1, got {samples} and {max_tokens}")
    check_preset(preset)
    tokenizer = getattr(processor, "tokenizer", processor)
    text = plain_text(source)
    if text is not None:
        if preset not in (None, "text") or split != "train" or name is not None or columns:
            raise ValueError(f"{source} is plain text: it takes preset 'text' alone, no split, name or columns")
        record = {"dataset": text[1].resolve().name, "preset": "text", "seed": seed}
        batches = text_windows(tokenizer, text[0], samples, max_tokens or TEXT_TOKENS)
        _report(str(source), batches, Counter(), samples, "text", processor)
        return CalibrationSet(batches, record)

    rows = open_rows(source, split=split, name=name, streaming=streaming)
    found, columns = rows.columns(), dict(columns or {})
    missing = [column for column in columns.values() if column not in found]
    if missing:
        raise ValueError(f"{rows.label}: columns names {', '.join(missing)}; columns found: {', '.join(found)}")
    try:
        preset = choose_preset(preset, [*found, *columns])
    except ValueError as error:
        raise ValueError(f"{rows.label}: {error}") from error
    if preset != "text" and getattr(processor, "chat_template", None) is None:
        raise ValueError(
            f"preset {preset!r} needs a chat template, and {type(processor).__name__} has none: set its "
            "chat_template, or pass preset='text' with a column text"
        )
    batches, left_out = [], Counter()
    wanted = [columns.get(column, column) for column in PRESETS[preset].columns()]
    reading = Reading(getattr(processor, "image_processor", None) is not None, rows.folder)
    for number, row in rows.shuffled(seed, wanted, ROWS_A_SEQUENCE * samples):
        try:
            renamed = {**row, **{column: row.get(given) for column, given in columns.items()}}
            batches.append(_sequence(processor, PRESETS[preset].convert(renamed, reading), max_tokens))
        except Unused as unused:
            left_out[str(unused)] += 1
        except (ValueError, TypeError, LookupError, OSError, TemplateError) as error:
            raise ValueError(f"{rows.label}, row {number}: {reason(error)}") from error
        if len(batches) == samples:
            break
    _report(rows.label, batches, left_out, samples, preset, processor)
    return CalibrationSet(batches, {"dataset": "in memory", **rows.record, "preset": preset, "seed": seed})


def _sequence(processor: Any, content: str | Messages, max_tokens: int | None) -> Batch:
    """One row's text or conversation as a batch of one sequence."""
    if isinstance(content, str):
        tokenizer = getattr(processor, "tokenizer", processor)
        return text_windows(tokenizer, content, 1, max_tokens or TEXT_TOKENS)[0]
    if getattr(processor, "image_processor", None) is None:
        content = [{**message, "content": _without_parts(message["content"], processor)} for message in content]
    batch = chat_sequence(processor, content)
    limit = max_tokens or CHAT_TOKENS
    if batch["input_ids"].shape[1] > limit:
        raise Unused(f"longer than max_tokens={limit}")
    return batch


def _without_parts(parts: list[dict[str, Any]], processor: Any) -> str:
    """The content of a message as the string that a tokenizer's template takes."""
    if any(part["type"] == "image" for part in parts):
        raise ValueError(f"it has an image, and {type(processor).__name__} takes none: pass the model's processor")
    return "".join(part["text"] for part in parts)


def _holds_image(batch: Batch) -> bool:
    """Whether the processor made more of a row than tokens: `pixel_values`, or what else the model calls them."""
    return any("pixel" in name or value.is_floating_point() for name, value in batch.items())


def _report(
    label: str, batches: list[Batch], left_out: Counter[str], samples: int, preset: str, processor: Any
) -> None:
    """Warn of what is less than asked for, or than the model needs. Raises ValueError if nothing is left."""
    counts = ", ".join(f"{count} {why}" for why, count in left_out.most_common())
    if not batches:
        raise ValueError(f"no row of {label} can be used; rows left out: {counts or 'none'}")
    warnings = []
    if len(batches) < samples:
        warnings.append(f"{len(batches)} of the {samples} sequences that were asked for")
    if left_out:
        warnings.append(f"rows left out: {counts}")
    unlabelled = sum(int((batch["labels"] == IGNORED).all()) for batch in batches)
    if unlabelled == len(batches):
        warnings.append(
            "calibration needs answers: no sequence has a labelled token; with preset "
            f"{preset!r}, what gives one is {PRESETS[preset].answers}"
        )
    elif unlabelled:
        warnings.append(f"{unlabelled} of {len(batches)} sequences have no answer, so no labels")
    if getattr(processor, "image_processor", None) is not None and not any(map(_holds_image, batches)):
        warnings.append(f"no sequence holds an image, which {type(processor).__name__} takes")
    if warnings:
        logger.warning(f"Calibration data from {label}: {'; '.join(warnings)}")
