"""The demo: the embedded vision-language model, dense and with latent caches, asked the same held-out questions."""

from __future__ import annotations

import copy
import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from ..assets import demo_model_path
from ..calibration import collect_statistics, default_calibration
from ..calibration.chat import answer_batches, chat_inputs
from ..evaluate.accuracy import Accuracy, accuracy_by_type, answer_questions
from ..evaluate.divergence import Divergence, counted_logits, divergence
from ..evaluate.environment import environment
from ..evaluate.latency import Latency, decode_latency
from ..evaluate.memory import CacheBytes, kv_bytes_per_token
from ..evaluate.tables import text_table
from ..files import write_text
from ..quantizer import compress
from ..quantizer_config import WSVDConfig
from .dataset import evaluation_set
from .report import render_report


CONTEXT = 2048  # cached tokens at which decode steps are timed
BATCH_SIZE = 16
COMPARED = 64  # questions whose answers' distributions are compared: the first ones, which hold all types


@dataclass(frozen=True)
class Measured:
    """One line of the results: a model and all that was measured of it."""

    label: str
    ratio: float | None  # None: dense
    accuracy: dict[str, Accuracy]
    divergence: Divergence | None
    cache: CacheBytes
    latency: Latency
    answers: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without the answers."""
        return {
            "label": self.label,
            "rank_ratio": self.ratio,
            "accuracy": {kind: accuracy.to_dict() for kind, accuracy in self.accuracy.items()},
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "kv_bytes_per_token": self.cache.per_token,
            "kv_share_of_dense": self.cache.ratio,
            "cache": asdict(self.cache),
            "latency": self.latency.to_dict(),
            "seconds": round(self.seconds, 2),
        }


def parse_ratios(text: str) -> list[float]:
    """ "0.75,0.5" as numbers; ValueError naming one that is none or not between 0 and 1."""
    ratios = []
    for part in text.split(","):
        try:
            ratio = float(part)
        except ValueError:
            ratio = 0.0
        if not 0 < ratio < 1:
            raise ValueError(f"--ratios takes numbers between 0 and 1 separated by commas, not {part.strip()!r}")
        if ratio not in ratios:
            ratios.append(ratio)
    return ratios


def check_output_dir(folder: Path) -> None:
    """Create the folder if need be; ValueError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output folder {folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"output folder {folder} is not writable")


def run_demo(
    output_dir: Path, questions: int, ratios: list[float], seed: int = 0, model_path: Path | None = None
) -> dict[str, Any]:
    """Measure the dense model, then each ratio; write `results.json` and `report.html`; return the results.

    Args:
        questions: of each type.
        model_path: another checkpoint folder than the embedded model's, with processor and chat template.
    Raises:
        ValueError: the output folder cannot be written.
    """
    check_output_dir(output_dir)
    begin = time.perf_counter()
    path = model_path or demo_model_path()
    processor = AutoProcessor.from_pretrained(path)
    dense = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    dataset = evaluation_set(seed=seed, questions_per_type=questions)
    say(f"{len(dataset)} questions about {len(set(dataset['scene']))} scenes; dense, then ratios {ratios}")
    compared = min(len(dataset), COMPARED)
    batches = list(answer_batches(processor, dataset.select(range(compared)), BATCH_SIZE))
    reference = [counted_logits(dense, batch, "answer") for batch in batches]
    measured = [measure("dense", None, dense, processor, dataset)]
    # On scenes of the training split, which holds none of the questions' scenes.
    statistics = collect_statistics(dense, default_calibration(dense, processor, seed=seed), keep_answers=False)
    for ratio in ratios:
        # Distillation would keep more at low ratios, but take most of the demo's time on a CPU.
        config = WSVDConfig(rank_ratio=ratio, refinement="none")
        model = compress(copy.deepcopy(dense), config, statistics=statistics)
        distance = divergence(reference, model, batches, "answer")
        measured.append(measure(f"WSVD {ratio:g}", ratio, model, processor, dataset, distance))
    options = ["--output-dir", str(output_dir), "--questions", str(questions)]
    options += ["--ratios", ",".join(f"{ratio:g}" for ratio in ratios), "--seed", str(seed)]
    results = {
        "command": shlex.join(["hf-wsvd", "demo", *options]),
        "environment": environment(),
        "seed": seed,
        "questions_per_type": questions,
        "compared_questions": compared,
        "context": CONTEXT,
        "calibration": statistics.info,
        "rows": [row.to_dict() for row in measured],
        "questions": [
            {**{name: row[name] for name in ("question", "answer", "question_type", "scene")}, "answers": answers}
            for row, answers in zip(dataset.remove_columns("image"), _answers_by_question(measured))
        ],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_text(output_dir / "results.json", json.dumps(results, indent=1))
    write_text(output_dir / "report.html", render_report(results, dataset))
    return results


def measure(
    label: str,
    ratio: float | None,
    model: PreTrainedModel,
    processor: Any,
    dataset: Dataset,
    distance: Divergence | None = None,
) -> Measured:
    """Ask a model all questions, weigh its cache and time its decode steps."""
    begin = time.perf_counter()
    answers = answer_questions(model, processor, dataset, BATCH_SIZE)
    accuracy = accuracy_by_type(dataset, answers)
    cache = kv_bytes_per_token(model, chat_inputs(processor, [dataset[0]], with_answer=False))
    latency = decode_latency(model, CONTEXT, repeats=2)
    seconds = time.perf_counter() - begin
    say(f"{label}: {accuracy['all'].mean:.1%} right, {cache.per_token:,.0f} bytes a token, {seconds:.0f} s")
    return Measured(label, ratio, accuracy, distance, cache, latency, answers, seconds)


def _answers_by_question(measured: list[Measured]) -> list[dict[str, str]]:
    """For each question, label -> answer."""
    return [dict(zip([row.label for row in measured], answers)) for answers in zip(*(row.answers for row in measured))]


def results_table(results: dict[str, Any]) -> str:
    """The results for the console."""
    kinds = list(results["rows"][0]["accuracy"])
    header = ["", *kinds, "KL", "same top", "KV bytes", "of dense", "tokens/s"]
    lines = []
    for row in results["rows"]:
        distance = row["divergence"]
        lines.append(
            [row["label"]]
            + [f"{row['accuracy'][kind]['mean']:.1%}" for kind in kinds]
            + ([f"{distance['kl']:.4f}", f"{distance['agreement']:.1%}"] if distance else ["", ""])
            + [f"{row['kv_bytes_per_token']:,.0f}", f"{row['kv_share_of_dense']:.1%}"]
            + [f"{row['latency']['tokens_per_second']:.0f}"]
        )
    return text_table(header, lines)


def say(text: str) -> None:
    """A line of progress; standard output is for the results."""
    print(text, file=sys.stderr, flush=True)
