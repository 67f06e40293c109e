"""Conversations as model inputs, through a chat template: for calibration, generation and scoring."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from PIL import Image
from transformers.utils import logging

from .batches import IGNORED, Batch


Row = Mapping[str, Any]
Messages = list[dict[str, Any]]  # role; content: a list of parts, or a string for a tokenizer

MERGED_TOKENS = 4  # a tokenizer joins at most so many tokens across the start or the end of an answer

logger = logging.get_logger(__name__)


def exchange(question: str, answer: str | None, image: Image.Image | None) -> Messages:
    """One question, about an image or about none, and its answer if there is one, as chat messages."""
    user = [{"type": "image", "image": image.convert("RGB")}] if image is not None else []
    messages = [{"role": "user", "content": [*user, {"type": "text", "text": question}]}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


def conversation(row: Row, with_answer: bool) -> Messages:
    """A row with `image` (PIL), `question` and `answer` as chat messages, with its answer if asked for."""
    return exchange(row["question"], row["answer"] if with_answer else None, row["image"])


def chat_inputs(processor: Any, rows: list[Row], *, with_answer: bool, padding_side: str = "left") -> Batch:
    """Tensors of a padded batch: `input_ids` and `attention_mask` `[B, S]`, `pixel_values` as the model wants them."""
    inputs = processor.apply_chat_template(
        [conversation(row, with_answer) for row in rows],
        add_generation_prompt=not with_answer,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": padding_side},
    )
    return tensors_of(inputs)


def answer_batches(processor: Any, rows: Iterable[Row], batch_size: int = 16) -> Iterator[Batch]:
    """Batches of questions with their answers, padded on the right; `labels` `[B, S]` as in `answer_labels`.

    Raises ValueError if the template writes the question differently once an answer follows.
    """
    for chunk in chunks(rows, batch_size):
        inputs = chat_inputs(processor, chunk, with_answer=True, padding_side="right")
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for number, row in enumerate(chunk):
            attended = inputs["attention_mask"][number] != 0
            tokens = inputs["input_ids"][number][attended]
            labels[number, attended] = answer_labels(processor, conversation(row, with_answer=True), tokens)
        yield {**inputs, "labels": labels}


def chat_sequence(processor: Any, messages: Messages) -> Batch:
    """One conversation as model inputs: `input_ids`, `attention_mask`, `labels` int64 `[1, S]`, and any pixel inputs.

    One that does not end in an answer ends in the template's generation prompt, as it would in use.

    Args:
        processor: a processor (content as parts, images as `{"type": "image", "image": PIL}`), or a tokenizer
            (content as strings).
    Raises:
        ValueError: see `answer_labels`.
    """
    inputs = _tokenized(processor, messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    return {**inputs, "labels": answer_labels(processor, messages, inputs["input_ids"][0])[None]}


def answer_labels(processor: Any, messages: Messages, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens `[S]` that a model has to write in this conversation, -100 elsewhere.

    These are the assistant turns, each from where the generation prompt ends to the end of what the template writes
    for the turn (with its end-of-turn token: the model must predict it too). Found by comparison with the tokens of
    the conversation cut before and after the turn, so that any processor and image size is right. A turn that the
    template writes differently once others follow is not labelled, with a warning.

    Args:
        tokens: what the processor makes of all `messages`, without padding.
    Raises:
        ValueError: there are answers, and the template keeps the prompt of none as it is.
    """
    labels = torch.full_like(tokens, IGNORED)
    # An answer without a question has no prompt: nothing would generate it.
    turns = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    text = _written(processor, messages)
    labelled = 0
    for number in turns:
        begin = _common_tokens(processor, messages[:number], True, text, tokens)
        end = len(tokens)
        if number < len(messages) - 1:
            end = _common_tokens(processor, messages[: number + 1], False, text, tokens)
        if begin is not None and end is not None:
            labels[begin:end] = tokens[begin:end]
            labelled += 1
    if turns and not labelled:
        raise ValueError("The chat template does not keep the prompt as it is before an answer: no answer positions")
    if labelled < len(turns):
        logger.warning_once(
            "The chat template writes an answer differently once the conversation goes on; such answers are not "
            "labelled, the last one of a conversation is"
        )
    return labels


def _common_tokens(
    processor: Any, messages: Messages, add_generation_prompt: bool, text: str, tokens: torch.Tensor
) -> int | None:
    """How many of `tokens` come from the first messages; None if `text`, of all of them, starts otherwise."""
    if not text.startswith(_written(processor, messages, add_generation_prompt)):
        return None
    first = _tokenized(processor, messages, add_generation_prompt)["input_ids"][0]
    length = min(len(first), len(tokens))
    different = (first[:length] != tokens[:length]).nonzero()
    common = int(different[0]) if len(different) else length
    # More than a joined token means that something else changed, such as the size at which images are read.
    return common if len(first) - common <= MERGED_TOKENS else None


def _written(processor: Any, messages: Messages, add_generation_prompt: bool = False) -> str:
    return processor.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)


def _tokenized(processor: Any, messages: Messages, add_generation_prompt: bool) -> Batch:
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return tensors_of(inputs)


def tensors_of(inputs: Mapping[str, Any]) -> Batch:
    """The tensors among what a processor returns."""
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Lists of `size` rows, the last one shorter."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def place(batch: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The batch on the model's first device, floating tensors in the model's dtype."""
    device = next((weight.device for weight in model.parameters() if weight.device.type != "meta"), "cpu")
    return {
        name: value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in batch.items()
    }
