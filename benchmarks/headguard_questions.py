"""Questions of benchmarks/headguard.py: what is evaluated, and labelled scenes that heads are chosen on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accuracy_measure import EvaluationBatch
from accuracy_tasks import MEAN_OF, TILE_SIZE, embedded, question_rows
from cache_tasks import PieceBatch, equally_long, padded
from hf_wsvd.calibration.batches import IGNORED, Batch, CalibrationSet
from hf_wsvd.calibration.chat import answer_batches
from hf_wsvd.demo.dataset import evaluation_rows
from hf_wsvd.demo.scenes import CELLS, GRID, sample_scenes, tile_names


EVALUATION_SEED = 3000  # of the scenes; other benchmarks use 1000 and 2000
SCENES = 100  # that heads are chosen on, as many as the paper takes


@dataclass(frozen=True)
class QuestionBatch:
    """Questions whose images stand in one run at the same place, padded on the right.

    Attributes:
        embeds: `[B, S, E]`, images read in.
        labels: `[B, S]`, -100 where nothing is counted.
        image: positions of the image tokens.
        prompt: tokens of the call that fills the cache; all later ones read it.
    """

    embeds: Tensor
    labels: Tensor
    image: slice
    prompt: int

    @property
    def counted(self) -> Tensor:
        """bool `[B, S - prompt]`: positions of the second call that predict a token of the answer."""
        return torch.nn.functional.pad(self.labels[:, self.prompt + 1 :] != IGNORED, (0, 1))


@dataclass(frozen=True)
class Questions:
    """The evaluation set: batches, and the type of each question in the order of the results."""

    batches: list[QuestionBatch]
    kinds: list[str]


def evaluation_questions(
    model: PreTrainedModel,
    processor: Any,
    rows: list[dict[str, Any]],
    batch_size: int,
    dtype: torch.dtype,
    reads: str = "text",
) -> Questions:
    """Rows with image, question, answer and question_type, read by the vision tower of `model` in its own dtype.

    Args:
        dtype: of the decoder's inputs.
        reads: what reads the image as stored: "text", all that follows it, as in the second question about an image
            that is cached; or "answer", the prompt's last token and the answer alone.

    Raises:
        ValueError: image tokens that do not stand in one run, at the same place in all prompts of a batch.
    """
    read = []
    for batch in answer_batches(processor, rows, 100):
        found = embedded(model, batch)
        mask = (batch["input_ids"] == model.config.image_token_id).to(found.labels.device)
        read.append(EvaluationBatch({**found.inputs, "image_mask": mask}, found.labels))
    if reads == "answer":
        pieces, order = equally_long(read, batch_size)
    else:
        pieces, order = of_like_length(read, batch_size)
    batches = []
    for piece in pieces:
        mask = piece.inputs["image_mask"].bool()
        positions = mask[0].nonzero()[:, 0]
        image = slice(int(positions[0]), int(positions[-1]) + 1)
        if len(positions) != image.stop - image.start or bool((mask != mask[:1]).any()):
            raise ValueError("the image tokens of a batch must stand in one run at the same place")
        prompt = piece.pieces[0] if reads == "answer" else image.stop
        batches.append(QuestionBatch(piece.inputs["inputs_embeds"].to(dtype), piece.labels, image, prompt))
    return Questions(batches, [rows[index]["question_type"] for index in order])


def of_like_length(batches: list[EvaluationBatch], batch_size: int) -> tuple[list[PieceBatch], list[int]]:
    """Sequences padded on the right in batches of like length; and which sequence each one is."""
    sequences = []
    for batch in batches:
        for row, labels in enumerate(batch.labels):
            end = int((labels != IGNORED).nonzero()[-1, 0]) + 1
            inputs = {name: x[row, :end] for name, x in batch.inputs.items()}
            sequences.append((len(sequences), inputs, labels[:end]))
    sequences.sort(key=lambda sequence: len(sequence[2]))
    found = []
    for start in range(0, len(sequences), batch_size):
        part = sequences[start : start + batch_size]
        inputs = {name: padded([inputs[name] for _, inputs, _ in part], 0) for name in part[0][1]}
        labels = padded([labels for _, _, labels in part], IGNORED)
        found.append(PieceBatch(inputs, labels, (labels.shape[1],)))
    return found, [number for number, _, _ in sequences]


def hard_rows(per_type: int) -> list[dict[str, Any]]:
    """`per_type` evaluation questions of each of the hard types."""
    rows = [row for row in question_rows(EVALUATION_SEED, per_type) if row["question_type"] in MEAN_OF]
    return sorted(rows, key=lambda row: row["question_type"])


def guarding_rows(seed: int, scenes: int = SCENES) -> list[dict[str, Any]]:
    """One question about each of `scenes` training scenes, the hard types in equal shares; `cells` name its evidence.

    `cells` is bool `[16]`: the tiles, row by row, that the answer tells of.
    """
    columns = evaluation_rows(seed, scenes, tile_size=TILE_SIZE, split="train")
    # `evaluation_rows` draws its scenes first: the same generator gives their names again.
    names = sample_scenes(2 * scenes + 64, torch.Generator().manual_seed(seed), "train").names
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    share, rest = divmod(scenes, len(MEAN_OF))
    chosen, start = [], 0
    for number, kind in enumerate(MEAN_OF):
        count = share + (number < rest)
        chosen += [row for row in rows if row["question_type"] == kind][start : start + count]
        start += count
    return [{**row, "cells": evidence_cells(row["question"], names[row["scene"]])} for row in chosen]


def evidence_cells(question: str, names: Tensor) -> Tensor:
    """bool `[16]`: the tiles that the answer to a question of the hard types tells of; `names` int64 `[16]`."""
    cells = torch.arange(CELLS)
    if match := re.fullmatch(r"What is in row (\d+), column (\d+)\?", question):
        row, column = (int(number) - 1 for number in match.groups())
        return cells == row * GRID + column
    if match := re.fullmatch(r"List row (\d+)\.", question):
        return cells // GRID == int(match[1]) - 1
    if match := re.fullmatch(r"How many (.+) are there\?|Where is the (.+)\?", question):
        return names == tile_names().index(match[1] or match[2])
    raise ValueError(f"no evidence is known for {question!r}")


def guarding_batches(processor: Any, rows: list[dict[str, Any]], image_token_id: int, seed: int) -> CalibrationSet:
    """Model inputs with `labels` and `evidence_mask` of `guarding_rows`, on the CPU.

    Raises:
        ValueError: image tokens that are no square grid over the tiles.
    """
    return CalibrationSet(_guarding_batches(processor, rows, image_token_id), {"dataset": "emoji grids", "seed": seed})


def _guarding_batches(processor: Any, rows: list[dict[str, Any]], image_token_id: int) -> Iterator[Batch]:
    for number, batch in enumerate(answer_batches(processor, rows, 25)):
        images = batch["input_ids"] == image_token_id
        evidence = torch.zeros_like(images)
        for row, found in enumerate(images):
            cells = rows[25 * number + row]["cells"].view(GRID, GRID)
            side = round(int(found.sum()) ** 0.5) // GRID  # patches along a tile
            if (side * GRID) ** 2 != int(found.sum()):
                raise ValueError(f"{int(found.sum())} image tokens are no grid over {GRID} x {GRID} tiles")
            evidence[row, found] = cells.repeat_interleave(side, 0).repeat_interleave(side, 1).flatten()
        yield {**batch, "evidence_mask": evidence}
