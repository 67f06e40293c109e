"""Plain text as model inputs."""

from typing import Any

import torch

from .batches import IGNORED, Batch


def text_windows(tokenizer: Any, text: str, samples: int, max_tokens: int) -> list[Batch]:
    """`samples` windows of at most `max_tokens` tokens at even distances in `text`; the first one alone if 1.

    `input_ids`, `attention_mask` and `labels` int64 `[1, S]`. Windows overlap when the text is short; no two hold the
    same tokens, so there are fewer where the text does not have as many. Each starts with the tokenizer's BOS token if
    the tokenizer adds one; all other tokens are labelled.

    Raises ValueError for a text without tokens.
    """
    start = tokenizer("")["input_ids"]
    start = start if start == [tokenizer.bos_token_id] and max_tokens > 1 else []
    length = max_tokens - len(start)
    # verbose=False: the text is longer than the model's context on purpose, and is cut below
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise ValueError(f"the calibration text has no tokens under {type(tokenizer).__name__}")
    last = max(len(tokens) - length, 0)
    count = min(samples, last + 1)
    begins = [round(last * number / max(count - 1, 1)) for number in range(count)]
    windows = []
    for window in dict.fromkeys(tuple(tokens[begin : begin + length]) for begin in begins):
        ids = torch.tensor([[*start, *window]])
        labels = ids.clone()
        labels[:, : len(start)] = IGNORED
        windows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return windows
