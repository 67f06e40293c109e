"""The tasks of benchmarks/cache_quality.py: what is read from a cache, and how it is scored.

Every scored token reads the cache as it is stored, as in decoding. Perplexity: a window goes through the model in
pieces of 64 tokens. Questions: the prompt without its last token is one call, that token and the expected answer
another; an answer is right if each of its tokens is the most likely one after the right ones before it, which is so
exactly if greedy generation writes it. The sequences of a batch have equally long prompts: nothing is padded but
answers on the right, where no scored position attends.
"""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from accuracy_measure import (
    EvaluationBatch,
    Score,
    SequenceSums,
    counted_states,
    measure,
    ratio_estimate,
    share_right,
)
from accuracy_tasks import MEAN_OF, Task, TextTask, VisionTask, answers_right, embedded, question_rows
from cache_settings import Setting, dense_elements, size_of
from context_questions import SHOTS, load_questions
from hf_wsvd import WSVDConfig, collect_statistics, compress
from hf_wsvd.calibration.batches import IGNORED
from hf_wsvd.calibration.chat import answer_batches
from hf_wsvd.compat import CACHE_ARGUMENT
from smollm2 import leading_windows, load_smollm2, load_text


EVALUATION_SEED = 2000  # of the scenes
CALIBRATION_SEED = 0
RANK_RATIO = 0.5  # of the latents
WINDOW, PIECE = 1024, 64  # tokens


@dataclass(frozen=True)
class PieceBatch(EvaluationBatch):
    """A batch that goes through the model in calls of `pieces` tokens."""

    pieces: tuple[int, ...]


@dataclass
class CacheScores:
    """Of one cache on one task: metrics, and the size of all batches' caches when their last token was in."""

    metrics: dict[str, Score]
    cache_bytes: int
    dense_elements: int


@dataclass
class CacheTask:
    """A dense model, and batches to read from a cache.

    Attributes:
        source: what the calibration inputs are drawn by.
        prefill: `prefill` of the caches: "exact" where no token of the first call is scored.
        kinds: of every sequence.
        order: which sequence (of `kinds`) each row of the batches is.
    """

    name: str
    description: str
    settings: dict[str, Any]
    model: PreTrainedModel
    source: Task
    batches: list[PieceBatch]
    prefill: str
    kinds: list[str]
    order: list[int]
    dense: PreTrainedModel = field(init=False)
    dense_states: list[Tensor] = field(init=False)

    def prepare(self, dtype: torch.dtype) -> None:
        """Fix the dense model's answers, in the dtype of the measurement."""
        self.batches = [cast(batch, dtype) for batch in self.batches]
        self.dense = copy.deepcopy(self.model).to(dtype)
        self.dense_states = [counted_states(self.dense, batch) for batch in self.batches]

    def latent_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model with latents of half the width."""
        statistics = collect_statistics(self.model, self.source.calibration(CALIBRATION_SEED))
        config = WSVDConfig(rank_ratio=RANK_RATIO, self_check="none")
        return compress(copy.deepcopy(self.model), config, statistics=statistics).to(dtype)

    def scores(self, model: PreTrainedModel, setting: Setting) -> CacheScores:
        """Of `model` with caches of `setting`. ValueError where they do not go together."""
        size = elements = 0

        def states(model: PreTrainedModel, batch: PieceBatch) -> Tensor:
            nonlocal size, elements
            cache = setting.make(model, prefill=self.prefill)
            found = cached_states(model, batch, cache)
            size += size_of(cache)
            elements += dense_elements(model, len(batch.labels) * sum(batch.pieces))
            return found

        sums = measure(model, self.batches, self.dense_states, states)
        return CacheScores(self.metrics(sums), size, elements)

    def metrics(self, sums: SequenceSums) -> dict[str, Score]:
        """The task's own, and `kl` to the dense model in nats a scored token."""
        back = torch.tensor(self.order).argsort()
        sums = SequenceSums(**{name: values[back] for name, values in vars(sums).items()})
        return {**METRICS[self.name](sums, self.kinds), "kl": ratio_estimate(sums.kl, sums.tokens)}


def cast(batch: PieceBatch, dtype: torch.dtype) -> PieceBatch:
    """The same batch with its floating-point inputs in `dtype`."""
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.inputs.items()}
    return PieceBatch(inputs, batch.labels, batch.pieces)


@torch.no_grad()
def cached_states(model: PreTrainedModel, batch: PieceBatch, cache: Cache) -> Tensor:
    """What `counted_states` gives, read through `cache` piece by piece."""
    decoder, states, start = model.get_decoder(), [], 0
    for length in batch.pieces:
        piece = {name: x[:, start : start + length] for name, x in batch.inputs.items()}
        states.append(decoder(**piece, use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state)
        start += length
    return torch.cat(states, 1)[:, :-1][batch.counted]


def vision_metrics(sums: SequenceSums, kinds: list[str]) -> dict[str, Score]:
    """Share of right answers of each type, and their mean."""
    right = answers_right(sums)
    scores = {kind: share_right(right[torch.tensor([k == kind for k in kinds])]) for kind in MEAN_OF}
    error = math.sqrt(sum(score.standard_error**2 for score in scores.values())) / len(scores)
    mean = Score(sum(score.value for score in scores.values()) / len(scores), error)
    return {"accuracy_mean": mean, **{f"accuracy_{kind}": score for kind, score in scores.items()}}


def text_metrics(sums: SequenceSums, kinds: list[str]) -> dict[str, Score]:
    """Perplexity; each window's first token is not scored."""
    nats = ratio_estimate(sums.nll, sums.tokens)
    value = math.exp(nats.value)
    return {"perplexity_wikipedia": Score(value, value * nats.standard_error)}


def context_metrics(sums: SequenceSums, kinds: list[str]) -> dict[str, Score]:
    """How often the passage's answer is written, and how often it is more likely than the other one."""
    answer = torch.tensor([kind == "answer" for kind in kinds])
    return {
        "accuracy_exact": share_right(answers_right(sums)[answer]),
        "accuracy_preferred": share_right(sums.nll[answer] < sums.nll[~answer]),
    }


METRICS = {"vlm": vision_metrics, "wikipedia": text_metrics, "context": context_metrics}
HEADLINE = {"vlm": "accuracy_mean", "wikipedia": "perplexity_wikipedia", "context": "accuracy_exact"}


def vision_task(checkpoint: Path, device: str, questions: int, calibration: int, batch_size: int) -> CacheTask:
    """The measuring model and `questions` of each of the four hard types."""
    source = VisionTask.load(checkpoint, device, 1, calibration)
    rows = [row for row in question_rows(EVALUATION_SEED, questions) if row["question_type"] in MEAN_OF]
    rows.sort(key=lambda row: row["question_type"])
    read = [embedded(source.model, batch) for batch in answer_batches(source.processor, rows, 100)]
    batches, order = equally_long(read, batch_size)
    kinds = [row["question_type"] for row in rows]
    settings = {"evaluation_seed": EVALUATION_SEED, "questions_per_type": questions}
    return CacheTask("vlm", source.description, settings, source.model, source, batches, "exact", kinds, order)


def equally_long(batches: list[EvaluationBatch], batch_size: int) -> tuple[list[PieceBatch], list[int]]:
    """Sequences padded on the right, in batches of equally long prompts; and which sequence each one is.

    A prompt is what stands before the first counted token.
    """
    sequences: dict[int, list[tuple[int, dict[str, Tensor], Tensor]]] = {}
    number = 0
    for batch in batches:
        for row, labels in enumerate(batch.labels):
            counted = (labels != IGNORED).nonzero()[:, 0]
            prompt, end = int(counted[0]), int(counted[-1]) + 1
            inputs = {name: x[row, :end] for name, x in batch.inputs.items()}
            sequences.setdefault(prompt, []).append((number, inputs, labels[:end]))
            number += 1
    found, order = [], []
    for prompt, members in sorted(sequences.items()):
        members.sort(key=lambda member: len(member[2]))  # answers of like length
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            order += [index for index, _, _ in part]
            inputs = {name: padded([inputs[name] for _, inputs, _ in part], 0) for name in part[0][1]}
            labels = padded([labels for _, _, labels in part], IGNORED)
            # The last token only predicts what comes after the answer.
            pieces = (prompt - 1, labels.shape[1] - prompt + 1)
            found.append(PieceBatch(inputs, labels, pieces))
    return found, order


def padded(rows: list[Tensor], value: int) -> Tensor:
    """One tensor of vectors or matrices, filled up on the right with `value`."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def smollm2_source(wheel: Path | None, text: Path, device: str, calibration_windows: int) -> TextTask:
    """SmolLM2 and its calibration text."""
    model, _ = load_smollm2(wheel)
    settings = {"calibration_windows": calibration_windows, "calibration_window": 512}
    return TextTask("smollm2", "SmolLM2-135M-Instruct", model.to(device), [], settings, [], load_text(text))


def text_task(source: TextTask, device: str, windows: int, batch_size: int) -> CacheTask:
    """Perplexity of Wikipedia text."""
    ids = leading_windows(source.tokens["evaluation_wikipedia"], windows, WINDOW).to(device)
    pieces = (PIECE,) * (WINDOW // PIECE)
    batches = [PieceBatch({"input_ids": part}, part, pieces) for part in ids.split(batch_size)]
    settings = {"windows": len(ids), "window": WINDOW, "piece": PIECE}
    kinds = ["wikipedia"] * len(ids)
    order = list(range(len(ids)))
    return CacheTask("wikipedia", source.description, settings, source.model, source, batches, "stored", kinds, order)


def context_task(source: TextTask, path: Path, device: str, questions: int, batch_size: int) -> CacheTask:
    """Questions about passages: each stands twice, with the passage's answer and with the other one."""
    asked = load_questions(path)[:questions]
    given = []
    for column in ("answer", "other"):
        for question in asked:
            written = getattr(question, column)
            ids = torch.cat([question.prompt, written])[None].to(device)
            labels = ids.clone()
            labels[:, : len(question.prompt)] = IGNORED
            given.append(EvaluationBatch({"input_ids": ids}, labels))
    batches, order = equally_long(given, batch_size)
    kinds = ["answer"] * len(asked) + ["other"] * len(asked)
    settings = {"questions": len(asked), "solved_examples": SHOTS}
    return CacheTask("context", source.description, settings, source.model, source, batches, "exact", kinds, order)
