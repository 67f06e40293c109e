"""The two tasks of benchmarks/accuracy.py: a model, its calibration inputs, and its held-out score."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from accuracy_measure import (
    EvaluationBatch,
    Score,
    SequenceSums,
    counted_states,
    measure,
    ratio_estimate,
    share_right,
)
from hf_wsvd.calibration.batches import Batch
from hf_wsvd.calibration.chat import answer_batches, place
from hf_wsvd.demo.dataset import evaluation_rows
from hf_wsvd.demo.questions import QUESTION_TYPES
from smollm2 import GGUF, REQUIREMENT, TEXTS, drawn_windows, leading_windows, load_smollm2, load_text


EVALUATION_SEED = 1000
TILE_SIZE = 42  # pixels; what the measuring model was trained on
MEAN_OF = ("at", "list", "count", "where")  # the types that `accuracy_mean` counts: the hard ones


@dataclass
class Task:
    """A dense model and what it is measured on; `settings` and `description` go into the results."""

    name: str
    description: str
    model: PreTrainedModel
    batches: list[EvaluationBatch]
    settings: dict[str, Any]
    dense_states: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.dense_states = [counted_states(self.model, batch) for batch in self.batches]

    def calibration(self, seed: int) -> list[Batch]:
        """Model inputs with `labels`, drawn by `seed` from data that evaluation does not hold."""
        raise NotImplementedError

    def scores(self, model: PreTrainedModel) -> dict[str, Score]:
        """Every metric of `model`: the task's own, and `kl` to the dense model in nats a counted token."""
        sums = measure(model, self.batches, self.dense_states)
        return {**self.own_scores(sums), "kl": ratio_estimate(sums.kl, sums.tokens)}

    def own_scores(self, sums: SequenceSums) -> dict[str, Score]:
        """The task's own metrics."""
        raise NotImplementedError


@dataclass
class VisionTask(Task):
    """The measuring model, and questions about scenes that its training could not draw."""

    processor: Any
    rows: list[dict[str, Any]]  # question, answer, image and type of every sequence

    @classmethod
    def load(cls, checkpoint: Path, device: str, questions: int, calibration_questions: int) -> "VisionTask":
        """From a checkpoint folder of measuring_model.py; numbers of questions are per type."""
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval().to(device)
        processor = AutoProcessor.from_pretrained(checkpoint)
        # Some versions of transformers read no padding token out of a GGUF file.
        processor.tokenizer.pad_token = processor.tokenizer.pad_token or "<|im_end|>"
        rows = sorted(
            question_rows(EVALUATION_SEED, questions), key=lambda row: row["question_type"]
        )  # of like length
        batches = [embedded(model, batch) for batch in answer_batches(processor, rows, 100)]
        settings = {
            "evaluation_seed": EVALUATION_SEED,
            "questions_per_type": questions,
            "calibration_questions_per_type": calibration_questions,
        }
        description = f"DINOv2-small + SmolLM2-135M-Instruct as LLaVA, {model.num_parameters() / 1e6:.0f} M, fp32"
        return cls("vlm", description, model, batches, settings, processor, rows)

    def calibration(self, seed: int) -> list[Batch]:
        rows = question_rows(seed, self.settings["calibration_questions_per_type"], split="train")
        return list(answer_batches(self.processor, rows, 24))

    def own_scores(self, sums: SequenceSums) -> dict[str, Score]:
        """Accuracies: an answer is right if all of its tokens are, see the docstring of accuracy.py."""
        right = answers_right(sums)
        scores = {}
        for kind in QUESTION_TYPES:
            here = torch.tensor([row["question_type"] == kind for row in self.rows])
            scores[f"accuracy_{kind}"] = share_right(right[here])
        mean_of = [scores[f"accuracy_{kind}"] for kind in MEAN_OF]
        error = math.sqrt(sum(score.standard_error**2 for score in mean_of)) / len(mean_of)
        scores["accuracy_mean"] = Score(sum(score.value for score in mean_of) / len(mean_of), error)
        scores["accuracy_all"] = share_right(right)
        return scores


def question_rows(seed: int, per_type: int, split: str = "evaluation") -> list[dict[str, Any]]:
    """Questions with image, answer and type, as one dict each; `split`: "evaluation" or "train"."""
    columns = evaluation_rows(seed, per_type, tile_size=TILE_SIZE, split=split)
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def answers_right(sums: SequenceSums) -> Tensor:
    """bool `[sequences]`: whether every counted token was the most likely one."""
    return sums.right == sums.tokens


@torch.no_grad()
def embedded(model: PreTrainedModel, batch: Batch) -> EvaluationBatch:
    """A batch with its images read: the vision tower is not compressed, so that one run of it serves all methods."""
    given: dict[str, Any] = {}
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: given.update(kwargs), with_kwargs=True
    )
    batch = place(batch, model)
    labels = batch.pop("labels")
    model(**batch, use_cache=False, logits_to_keep=1)
    hook.remove()
    return EvaluationBatch({"inputs_embeds": given["inputs_embeds"]}, labels)


@dataclass
class TextTask(Task):
    """SmolLM2, and windows of the evaluation halves of two kinds of text."""

    kinds: list[str]  # the text that each window is from
    tokens: dict[str, Tensor]  # as `load_text` gives them

    @classmethod
    def load(
        cls, wheel: Path | None, text: Path, device: str, windows: dict[str, int], calibration_windows: int
    ) -> "TextTask":
        """From the wheel and a file of smollm2.prepare_text; `windows` of 1,024 tokens by text to evaluate on."""
        model, _ = load_smollm2(wheel)
        model.to(device)
        tokens = load_text(text)
        batches, kinds = [], []
        for name in TEXTS:
            held_out = leading_windows(tokens[f"evaluation_{name}"], windows[name], 1024)
            for ids in held_out.to(device).split(8):
                batches.append(EvaluationBatch({"input_ids": ids}, ids))
                kinds += [name] * len(ids)
        settings = {
            "evaluation_windows": {name: kinds.count(name) for name in TEXTS},
            "evaluation_window": 1024,
            "calibration_windows": calibration_windows,
            "calibration_window": 512,
        }
        return cls("smollm2", f"{GGUF} of {REQUIREMENT}, fp32", model, batches, settings, kinds, tokens)

    def calibration(self, seed: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        count, length = self.settings["calibration_windows"], self.settings["calibration_window"]
        drawn = [drawn_windows(self.tokens[f"calibration_{name}"], count, length, generator) for name in TEXTS]
        ids = torch.cat(drawn)[torch.randperm(len(TEXTS) * count, generator=generator)]
        return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()} for x in ids.split(8)]

    def own_scores(self, sums: SequenceSums) -> dict[str, Score]:
        """Perplexities; each window's first token is not scored."""
        scores = {}
        for name in TEXTS:
            here = torch.tensor([kind == name for kind in self.kinds])
            nats = ratio_estimate(sums.nll[here], sums.tokens[here])
            value = math.exp(nats.value)
            scores[f"perplexity_{name}"] = Score(value, value * nats.standard_error)
        return scores
