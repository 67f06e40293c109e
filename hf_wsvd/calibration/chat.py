"""Image questions as model inputs, through a processor's chat template: for calibration, generation and scoring."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch


Row = Mapping[str, Any]  # image (PIL), question, answer


def conversation(row: Row, with_answer: bool) -> list[dict[str, Any]]:
    """One question about one image, and its answer if asked for, as chat messages."""
    image = row["image"].convert("RGB")
    user = [{"type": "image", "image": image}, {"type": "text", "text": row["question"]}]
    messages = [{"role": "user", "content": user}]
    if with_answer:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]})
    return messages


def chat_inputs(processor: Any, rows: list[Row], *, with_answer: bool, padding_side: str = "left") -> dict[str, Any]:
    """Tensors of a padded batch: `input_ids` and `attention_mask` `[B, S]`, `pixel_values` as the model wants them."""
    inputs = processor.apply_chat_template(
        [conversation(row, with_answer) for row in rows],
        add_generation_prompt=not with_answer,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": padding_side},
    )
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def answer_batches(processor: Any, rows: Iterable[Row], batch_size: int = 16) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of questions with their answers; `labels` `[B, S]` holds the answer's token ids, -100 elsewhere.

    What the template puts after the answer (end of turn) counts as answer: the model must predict it too.

    Raises ValueError if the template writes the question differently once an answer follows.
    """
    for chunk in chunks(rows, batch_size):
        inputs = chat_inputs(processor, chunk, with_answer=True, padding_side="right")
        prompt = chat_inputs(processor, chunk, with_answer=False, padding_side="right")
        asked = prompt["attention_mask"].bool()
        width = asked.shape[1]
        if width > inputs["input_ids"].shape[1] or not torch.equal(
            inputs["input_ids"][:, :width][asked], prompt["input_ids"][asked]
        ):
            raise ValueError(
                "The chat template does not keep the prompt as it is before an answer: no answer positions"
            )
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, :width].masked_fill_(asked, -100)
        yield {**inputs, "labels": labels}


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
