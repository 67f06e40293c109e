"""Calibration data from a text file (`.txt`) or from prompts (`.jsonl`)."""

import json
from pathlib import Path
from typing import Any

import torch

from ..calibration.data import Batch, text_windows


def read_calibration_file(path: Path) -> str | list[dict[str, Any]]:
    """The text of a `.txt` file, or the rows of a `.jsonl` file, checked before any model is loaded.

    A row is `{"text": "..."}`, or `{"messages": [...]}` in the form that chat templates take; images of a message are
    given by path or address: `{"type": "image", "path": "cat.png"}`.

    Raises ValueError naming the line that is wrong, or for another ending.
    """
    if path.suffix == ".txt":
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"{path} is empty")
        return text
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: calibration files end in .txt (plain text) or .jsonl (rows with text or messages)")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error.msg})") from error
        text = isinstance(row, dict) and isinstance(row.get("text"), str)
        if not text and not (isinstance(row, dict) and isinstance(row.get("messages"), list)):
            raise ValueError(f"{path}, line {number}: needs a text (string) or messages (list)")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no row")
    return rows


def file_batches(data: str | list[dict[str, Any]], processor: Any, samples: int, max_tokens: int) -> list[Batch]:
    """Batches of one sequence: `samples` windows spread over a text, or the first `samples` rows of a file.

    Rows of text are cut at `max_tokens` tokens; messages are not, as a cut could fall into an image.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if isinstance(data, str):
        return text_windows(tokenizer, data, samples, max_tokens)
    batches = []
    for row in data[:samples]:
        if "text" in row:
            inputs = tokenizer(row["text"], truncation=True, max_length=max_tokens, return_tensors="pt")
        else:
            inputs = processor.apply_chat_template(
                row["messages"], tokenize=True, return_dict=True, return_tensors="pt"
            )
        batches.append({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
    return batches
