"""Exact-match accuracy on questions about images, by question type."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.chat import chat_inputs, chunks, place


@dataclass(frozen=True)
class Accuracy:
    """Right answers out of `total`."""

    correct: int
    total: int

    @property
    def mean(self) -> float:
        """Share of right answers, 0 to 1; NaN without questions."""
        return self.correct / self.total if self.total else math.nan

    @property
    def standard_error(self) -> float:
        """Binomial standard error of `mean`. Rule of succession inside the root: no false 0 at all right or none."""
        share = (self.correct + 1) / (self.total + 2)
        return math.sqrt(share * (1 - share) / self.total) if self.total else math.nan

    def to_dict(self) -> dict[str, float]:
        """JSON form, with the derived numbers."""
        return {**asdict(self), "mean": self.mean, "standard_error": self.standard_error}


def answer_questions(
    model: PreTrainedModel, processor: Any, dataset: Dataset, batch_size: int = 16, max_new_tokens: int = 32
) -> list[str]:
    """The model's answer to each row (`image`, `question`), in order: greedy, left-padded batches, repeatable."""
    answers = []
    batches = logging.tqdm(
        chunks(dataset, batch_size), total=-(-len(dataset) // batch_size), desc="Answering", unit="batch"
    )
    training = model.training
    model.eval()
    try:
        for rows in batches:
            inputs = place(chat_inputs(processor, rows, with_answer=False), model)
            with torch.no_grad():
                tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
            new = tokens[:, inputs["input_ids"].shape[1] :]
            answers += processor.batch_decode(new, skip_special_tokens=True)
    finally:
        model.train(training)
    return [answer.strip() for answer in answers]


def is_correct(answer: str, expected: str) -> bool:
    """Equal up to white space."""
    return " ".join(answer.split()) == " ".join(expected.split())


def accuracy_by_type(dataset: Dataset, answers: list[str]) -> dict[str, Accuracy]:
    """Accuracy per `question_type` in order of appearance, and of all questions under "all".

    Raises ValueError unless there is one answer a row.
    """
    if len(answers) != len(dataset):
        raise ValueError(f"{len(answers)} answers for {len(dataset)} questions")
    counts: dict[str, list[int]] = {}
    for kind, expected, answer in zip(dataset["question_type"], dataset["answer"], answers):
        count = counts.setdefault(kind, [0, 0])
        count[0] += is_correct(answer, expected)
        count[1] += 1
    result = {kind: Accuracy(*count) for kind, count in counts.items()}
    result["all"] = Accuracy(sum(a.correct for a in result.values()), sum(a.total for a in result.values()))
    return result
