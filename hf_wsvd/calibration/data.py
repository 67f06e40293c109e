"""Calibration data: the built-in default set, and the check and record of any set before it reaches a model.

A calibration set is an iterable of model-input dicts, what a tokenizer or processor returns, so that any modality a
model takes can be calibrated on. Importing this module loads neither data nor model.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .batches import IGNORED, Batch, CalibrationSet
from .chat import chat_sequence, conversation
from .documentation import documentation_text
from .text import text_windows


TOKEN_COLUMNS = ("input_ids", "inputs_embeds")
INTEGERS = (torch.int64, torch.int32)  # dtypes of token ids


def takes_images(model: PreTrainedModel) -> bool:
    """Whether the model's forward names `pixel_values`."""
    return "pixel_values" in inspect.signature(model.forward).parameters


def default_calibration(
    model: PreTrainedModel, processor: Any = None, *, samples: int = 64, max_tokens: int = 512, seed: int = 0
) -> CalibrationSet:
    """The built-in calibration set: `samples` batches of one sequence each, with `labels`, on the CPU.

    A vision-language model gets emoji-grid scenes with a question and its answer in the processor's chat template
    (`max_tokens` does not cut these; labels: the answer), a text model gets windows of `max_tokens` tokens of Python's
    documentation (labels: all but a BOS token). The same arguments give the same set. Both are generic: data like that
    of the later use calibrates better, see `load_calibration`.

    Args:
        processor: the model's processor (images) or tokenizer (text); loaded from where the model came from if None.
    Raises:
        ValueError: no processor can be found, it has no chat template, or a count is below 1.
    """
    if samples < 1 or max_tokens < 1:
        raise ValueError(f"samples and max_tokens must be at least 1, got {samples} and {max_tokens}")
    if processor is None:
        processor = load_processor(model)
    if takes_images(model):
        return CalibrationSet(scene_batches(processor, samples, seed), {"dataset": "built-in scenes", "seed": seed})
    windows = text_windows(processor, documentation_text("calibration", seed), samples, max_tokens)
    return CalibrationSet(windows, {"dataset": "built-in documentation", "seed": seed})


def load_processor(model: PreTrainedModel) -> Any:
    """The processor (images) or tokenizer (text) stored where `model` was loaded from; ValueError if there is none."""
    from transformers import AutoProcessor, AutoTokenizer

    source = getattr(model.config, "_name_or_path", "")
    kind, auto_class = ("processor", AutoProcessor) if takes_images(model) else ("tokenizer", AutoTokenizer)
    remedy = f"Pass calibration=[...], a list of model-input dicts, or processor=, the model's {kind}."
    if not source:
        raise ValueError(
            f"The default calibration set needs a {kind}, and the model was not loaded from a path. {remedy}"
        )
    try:
        return auto_class.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, ImportError or KeyError, by what is missing
        raise ValueError(
            f"The default calibration set needs a {kind}; none loads from {source!r} ({_first_line(error)}). {remedy}"
        ) from error


def scene_batches(processor: Any, samples: int, seed: int) -> list[Batch]:
    """`samples` scenes as chat prompts with their answers, spread evenly over the question types."""
    from ..demo.dataset import calibration_set
    from ..demo.questions import QUESTION_TYPES

    if getattr(processor, "chat_template", None) is None or getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"The default calibration set of a vision-language model needs a processor with images and a chat "
            f"template, not {type(processor).__name__}. Pass calibration=[...], a list of model-input dicts."
        )
    scenes = calibration_set(seed, questions_per_type=-(-samples // len(QUESTION_TYPES)))
    chosen = scenes.shuffle(seed=seed).select(range(samples))
    return [chat_sequence(processor, conversation(row, with_answer=True)) for row in chosen]


def validate_batches(batches: Any, model: PreTrainedModel, *, description: str = "Calibrating") -> Iterator[Batch]:
    """Check a calibration set batch by batch, lazily, under a progress bar, and yield the model's inputs.

    Accepts one model-input dict or an iterable of them (list, generator, DataLoader, `datasets.Dataset` in torch
    format). Tensors keep their device and dtype, but for labels, which become int64. A row without batch axis, as from
    a Dataset, gets one in each column; columns that are no tensors and no arguments of the model's forward (captions,
    file names) are left out.

    Raises:
        ValueError: nothing to iterate or no batch in it; no `input_ids` and no `inputs_embeds`; a model argument that
            is no tensor; wrong dtype or rank; token ids outside the vocabulary; labels of another shape than the
            tokens, or that are neither token ids nor -100.
    """
    if isinstance(batches, Mapping):
        batches = [batches]
    if isinstance(batches, (str, bytes, torch.Tensor)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"Calibration data must be a model-input dict or an iterable of them, got {type(batches).__name__}"
        )
    arguments = set(inspect.signature(model.forward).parameters)
    number = -1
    for number, batch in enumerate(logging.tqdm(batches, desc=description, unit="batch")):
        yield _checked(batch, number, arguments, model)
    if number < 0:
        raise ValueError("Calibration data is empty: no batch to run the model on")


class Contents:
    """Counts and digest of a calibration set, as it is seen batch by batch."""

    def __init__(self) -> None:
        self.batches = self.samples = self.tokens = 0
        self._digest = hashlib.sha256()

    def add(self, batch: Mapping[str, torch.Tensor]) -> None:
        """One batch more."""
        first = batch.get("input_ids", batch.get("inputs_embeds"))
        self.batches += 1
        self.samples += first.shape[0]
        mask = batch.get("attention_mask")
        attended = first.shape[0] * first.shape[1] if mask is None or mask.ndim != 2 else int((mask != 0).sum())
        self.tokens += attended
        for name in sorted(name for name, value in batch.items() if isinstance(value, torch.Tensor)):
            value = batch[name].detach().cpu().contiguous()
            self._digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            self._digest.update(value.flatten().view(torch.uint8).numpy().data)  # bytes: numpy has no bfloat16

    def info(self) -> dict[str, Any]:
        """`samples`, `tokens` (attended ones) and `sha256` of what was seen so far."""
        return {"samples": self.samples, "tokens": self.tokens, "sha256": self._digest.hexdigest()}


def calibration_info(batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """What a checkpoint records of its calibration set: `samples`, `tokens` (attended ones), `sha256` of the contents.

    The digest covers names, dtypes, shapes and values, in order, so equal sets in unequal batches differ.
    """
    contents = Contents()
    for batch in batches:
        contents.add(batch)
    return contents.info()


def _checked(batch: Any, number: int, arguments: set[str], model: PreTrainedModel) -> Batch:
    """One batch with its columns checked, see `validate_batches`."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"Calibration batch {number} must be a dict of tensors, got {type(batch).__name__}; run the tokenizer or "
            f"processor with return_tensors='pt' first"
        )
    found = ", ".join(batch) or "none"
    if not any(batch.get(name) is not None for name in TOKEN_COLUMNS):
        raise ValueError(
            f"Calibration batch {number} needs a column input_ids or inputs_embeds; columns found: {found}"
        )
    tensors = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif name in arguments and value is not None:
            raise ValueError(
                f"Column {name} of calibration batch {number} must be a tensor, got {type(value).__name__}; use "
                f"return_tensors='pt', or Dataset.with_format('torch')"
            )
    if not any(name in tensors for name in TOKEN_COLUMNS):
        raise ValueError(
            f"Calibration batch {number} needs a tensor input_ids or inputs_embeds; columns found: {found}"
        )
    ids, embeds = tensors.get("input_ids"), tensors.get("inputs_embeds")
    if (ids is not None and ids.ndim == 1) or (ids is None and embeds.ndim == 2):
        tensors = {name: value[None] for name, value in tensors.items()}
        ids, embeds = tensors.get("input_ids"), tensors.get("inputs_embeds")
    if ids is not None:
        _check_ids(ids, number, model)
    if embeds is not None:
        _expect(embeds.is_floating_point(), "inputs_embeds", number, "a floating dtype", embeds.dtype)
        _expect(embeds.ndim == 3, "inputs_embeds", number, "shape [batch, sequence, hidden]", tuple(embeds.shape))
    mask = tensors.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        shape = (ids if ids is not None else embeds).shape[:2]
        _expect(mask.shape == shape, "attention_mask", number, f"shape {list(shape)}", list(mask.shape))
    if "labels" in tensors:
        _check_labels(tensors["labels"], (ids if ids is not None else embeds).shape[:2], number, model)
        tensors["labels"] = tensors["labels"].long()  # what losses take
    pixels = tensors.get("pixel_values")
    if pixels is not None:
        _expect(pixels.is_floating_point(), "pixel_values", number, "a floating dtype", pixels.dtype)
    return tensors


def _check_ids(ids: torch.Tensor, number: int, model: PreTrainedModel) -> None:
    """Token ids: integers `[batch, sequence]`, not empty, inside the embedding."""
    _expect(ids.dtype in INTEGERS, "input_ids", number, "dtype int64 or int32", ids.dtype)
    _expect(
        ids.ndim == 2 and ids.numel() > 0, "input_ids", number, "shape [batch, sequence], not empty", list(ids.shape)
    )
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = int(ids.min()), int(ids.max())
    inside = low >= 0 and high < vocabulary
    _expect(inside, "input_ids", number, f"ids from 0 to {vocabulary - 1}, the model's vocabulary", f"{low} to {high}")


def _check_labels(labels: torch.Tensor, shape: torch.Size, number: int, model: PreTrainedModel) -> None:
    """Labels: integers of the tokens' shape, each -100 or inside the vocabulary."""
    _expect(labels.dtype in INTEGERS, "labels", number, "dtype int64 or int32", labels.dtype)
    _expect(labels.shape == shape, "labels", number, f"shape {list(shape)}", list(labels.shape))
    embedded = model.get_input_embeddings().num_embeddings
    vocabulary = getattr(model.get_output_embeddings(), "out_features", None) or embedded  # what a head answers counts
    outside = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))]
    wanted = f"{IGNORED} or ids from 0 to {vocabulary - 1}, the model's vocabulary"
    _expect(not len(outside), "labels", number, wanted, outside[0].item() if len(outside) else None)


def _expect(condition: bool, column: str, number: int, wanted: str, found: Any) -> None:
    """ValueError with one wording for every failed check of a column."""
    if not condition:
        raise ValueError(f"Column {column} of calibration batch {number} must have {wanted}; found {found}")


def _first_line(error: Exception) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
