"""HeadGuard at equal bytes: what guarding a few KV heads' image tokens brings back, on the measuring model.

    python benchmarks/measuring_model.py vlm
    python benchmarks/headguard.py --device cuda --checkpoint vlm --output docs/results/headguard_vlm.json

Every base storage (scheme and bits) is combined with every selector, fraction and protection, over dense keys and
values and over latents of half the width; beside each row stands the best uniform storage of no more bits.
headguard_evaluator.py says how questions are read, headguard_rows.py how bits are counted: those of image keys and
values, with scales, exact windows and guarded heads. Heads are chosen on scenes of the training split, anew for every
calibration seed.

Rows are written as they come; a second run with the same --output measures what is missing. `--check N` compares N
cells a cache, question by question, with the real packed cache and its bytes.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from accuracy_tasks import VisionTask
from cache_tasks import CALIBRATION_SEED, RANK_RATIO
from headguard_check import check
from headguard_choices import (
    BASES,
    RECIPE_BASES,
    SELECTORS,
    UNIFORM,
    Base,
    Choice,
    guarded_heads,
    recipe_choices,
    table_choices,
)
from headguard_evaluator import Evaluator
from headguard_heads import Heads, heads_of
from headguard_questions import (
    EVALUATION_SEED,
    SCENES,
    evaluation_questions,
    guarding_batches,
    guarding_rows,
    hard_rows,
)
from headguard_rows import CELL, UNIFORM_CELL, add_controls, bits_of, known_cells, rows_of, uniform_rows, written
from headguard_scores import Scores
from headguard_tables import short_table
from hf_wsvd import WSVDConfig, collect_statistics, compress
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from record import command_line


CACHES = ("dense", "latent")
PARTS = ("uniform", "table", "recipes", "agreement")
SAVE_EVERY = 20  # seconds


class Run:
    """The results so far, and what is missing in them."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.dtype = getattr(torch, arguments.dtype)
        if arguments.output.exists():
            self.results = json.loads(arguments.output.read_text())
        else:
            empty = ("rows", "uniform", "refused", "agreement", "checks")
            self.results = {"command": "", "environment": {}, "settings": {}, **{name: [] for name in empty}}
        self.results.update(command=command_line("headguard.py"), environment=environment(arguments.device))
        self.results["settings"] |= {
            "model": "DINOv2-small + SmolLM2-135M-Instruct as LLaVA",
            "dtype": arguments.dtype,
            "questions_per_type": arguments.questions,
            "evaluation_seed": EVALUATION_SEED,
            "scenes": arguments.scenes,
            "reads": arguments.reads,
            "rank_ratio_of_latents": RANK_RATIO,
        }
        self.saved = self.started = time.perf_counter()

    def all(self) -> None:
        """Both kinds of cache."""
        arguments = self.arguments
        task = VisionTask.load(arguments.checkpoint, arguments.device, 1, arguments.calibration)
        token = task.model.config.image_token_id
        data = {
            seed: guarding_batches(task.processor, guarding_rows(seed, arguments.scenes), token, seed)
            for seed in arguments.seeds
        }
        questions = evaluation_questions(
            task.model,
            task.processor,
            hard_rows(arguments.questions),
            arguments.batch_size,
            self.dtype,
            arguments.reads,
        )
        self.kinds = questions.kinds
        self.results["settings"]["key_biases"] = any(
            attention.module.k_proj.bias is not None for attention in decoder_attentions(task.model)
        )
        self.report(f"{len(self.kinds)} questions")
        for cache in arguments.caches:
            model = (copy.deepcopy(task.model) if cache == "dense" else latent_model(task)).to(self.dtype)
            self.report(f"{cache} model")
            heads = heads_of(model, questions.batches)
            evaluator = Evaluator(model, heads)
            self.report(f"{cache}: prompts read")
            self.measure(cache, heads, evaluator, Scores(model, data))
            del model, heads, evaluator
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def measure(self, cache: str, heads: Heads, evaluator: Evaluator, scores: Scores) -> None:
        """Everything over one kind of cache."""
        arguments = self.arguments
        full = evaluator.right()
        self.results["settings"][f"{cache}_full_precision"] = rows_of(
            cache, Choice(Base("none", 16, 16)), full, self.kinds, bits_of(heads, None)
        )[-1]["accuracy"]
        if "uniform" in arguments.parts:
            self.uniform(cache, heads, evaluator)
        for part, bases, choices in (("table", BASES, table_choices), ("recipes", RECIPE_BASES, recipe_choices)):
            if part in arguments.parts:
                for base in bases:
                    cells = choices(base, arguments.selectors, arguments.seeds, cache)
                    self.base(cache, base, cells, heads, evaluator, scores, by_type=part == "table")
        if "agreement" in arguments.parts and not self.known("agreement", cache):
            compared = arguments.selectors if cache == "dense" else ["headguard", "restoration"]
            found = scores.agreement(compared, BASES[0], arguments.seeds)
            self.results["agreement"] += [{"cache": cache, **entry} for entry in found]
        if arguments.check and not self.known("checks", cache):
            self.results["checks"] += check(
                cache, heads, evaluator, scores, arguments.selectors, arguments.seeds[0], arguments.check
            )
        if scores.seconds:
            seconds = {name: round(value, 1) for name, value in scores.seconds.items()}
            self.results["settings"][f"{cache}_seconds_of_scores"] = seconds
        self.save()

    def known(self, name: str, cache: str) -> bool:
        """Whether the results hold entries of this kind of cache."""
        return any(entry["cache"] == cache for entry in self.results[name])

    def uniform(self, cache: str, heads: Heads, evaluator: Evaluator) -> None:
        """The curve of uniform storage."""
        known = known_cells(self.results["uniform"] + self.results["refused"], UNIFORM_CELL)
        before = None
        for base in UNIFORM:
            identity = {"cache": cache, **base.row}
            if tuple(identity[name] for name in UNIFORM_CELL) in known:
                continue
            if before is None or (before.scheme, before.group_size) != (base.scheme, base.group_size):
                heads.forget()
            before = base
            try:
                packed = heads.packed(base.config)
            except ValueError as error:  # group sizes that the latents' ranks do not allow
                self.results["refused"].append({**identity, "reason": str(error)})
                continue
            right = evaluator.right(packed)
            self.results["uniform"] += uniform_rows(cache, base, right, self.kinds, bits_of(heads, packed))
            self.saved_now_and_then()
        heads.forget()
        self.report(f"{cache}: uniform storage")

    def base(
        self,
        cache: str,
        base: Base,
        choices: Iterable[Choice],
        heads: Heads,
        evaluator: Evaluator,
        scores: Scores,
        by_type: bool,
    ) -> None:
        """All missing cells over one base storage; `by_type`: with rows for each type of question."""
        known = known_cells(self.results["rows"])
        missing = [c for c in choices if tuple({"cache": cache, **c.row}[name] for name in CELL) not in known]
        if not missing:
            return
        heads.forget()
        try:
            packed = heads.packed(base.config)
        except ValueError as error:
            refused = {"cache": cache, **base.row, "reason": str(error)}
            if refused not in self.results["refused"]:
                self.results["refused"].append(refused)
            return
        for choice in missing:
            guarded = guard = None
            if choice.selector != "none":
                guarded = guarded_heads(scores.guard_map(choice))
                guard = None if choice.guard_bits == 16 else heads.packed(base.config, choice.guard_bits)
            right = evaluator.right(packed, guarded, guard)
            bits = bits_of(heads, packed, guarded, guard)
            self.results["rows"] += rows_of(cache, choice, right, self.kinds, bits, by_type)
            self.saved_now_and_then()
        self.report(f"{cache}: {base.label}, {len(missing)} cells")

    def saved_now_and_then(self) -> None:
        if time.perf_counter() - self.saved > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the results, whole or not at all."""
        add_controls(self.results)
        write_text(self.arguments.output, written(self.results))
        self.saved = time.perf_counter()

    def report(self, line: str) -> None:
        """One line of progress."""
        print(f"{time.perf_counter() - self.started:6.0f} s  {line}", file=sys.stderr, flush=True)


def latent_model(task: VisionTask) -> PreTrainedModel:
    """The measuring model with latents of half the width, fitted as benchmarks/cache_quality.py does."""
    statistics = collect_statistics(task.model, task.calibration(CALIBRATION_SEED))
    return compress(
        copy.deepcopy(task.model), WSVDConfig(rank_ratio=RANK_RATIO, self_check="none"), statistics=statistics
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message for values that nothing can be measured with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="the folder that measuring_model.py wrote")
    add("--output", type=Path, required=True)
    add("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="what the cache holds")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--selectors", nargs="+", choices=SELECTORS, default=list(SELECTORS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the scenes that heads are chosen on")
    add("--questions", type=int, default=500, help="of each type")
    add("--scenes", type=int, default=SCENES, help="that heads are chosen on")
    add("--reads", choices=["text", "answer"], default="text", help="what reads images as stored: all that follows")
    add("--calibration", type=int, default=73, help="questions of each type that latents are fitted on")
    add("--limit", type=int, help="so many questions of each type, scenes, and questions to fit on, for a try")
    add("--check", type=int, default=0, help="cells to compare with the real packed cache")
    add("--batch-size", type=int, default=256)
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    add("--threads", type=int, default=2)
    found = parser.parse_args(arguments)
    if found.limit is not None:
        found.questions = found.calibration = found.limit
        found.scenes = max(found.limit, 4)
    for name in ("questions", "scenes", "calibration", "batch_size", "threads"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(found, name)}: at least 1")
    if found.check < 0 or min(found.seeds) < 0:
        parser.error("--check and --seeds: at least 0")
    if not found.checkpoint.is_dir():
        parser.error(f"--checkpoint {found.checkpoint}: no such folder")
    if found.dtype is None:
        found.dtype = "float32" if found.device == "cpu" else "bfloat16"
    return found


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    run = Run(arguments)
    run.all()
    print(short_table(run.results))


if __name__ == "__main__":
    main()
