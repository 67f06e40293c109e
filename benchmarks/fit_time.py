"""Seconds and peak memory of statistics and fit on a model of a given shape, by default LLaMA-7B's.

    python benchmarks/fit_time.py --device cuda --output docs/results/fit_time_h200.json

Weights and tokens are random: they change neither the work nor the memory. The statistics are those of `--samples`
samples of `--tokens` tokens, with and without what the Fisher refinement needs; the fits are at a rank ratio of 0.5.
Peak memory is that of tensors on the device, as torch's allocator counts it, the model's weights included.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_wsvd import WSVDConfig, collect_statistics
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.surgery import fitted
from record import command_line


RATIO = 0.5
REFINEMENTS = ("none", "fisher", "distillation")


class Stages:
    """Seconds and peak memory, stage by stage."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the body as the stage `name`."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if self.cuda:
            torch.cuda.synchronize()
        row = {"stage": name, "seconds": time.perf_counter() - start}
        row["peak_bytes"] = torch.cuda.max_memory_allocated() if self.cuda else None
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)


def random_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device in its dtype."""
    config = LlamaConfig(
        num_hidden_layers=arguments.layers,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        vocab_size=arguments.vocabulary,
        max_position_embeddings=max(4096, arguments.tokens),
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    try:
        with torch.device(arguments.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def random_batches(arguments: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """`samples` sequences of `tokens` random tokens, every one a label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(arguments.vocabulary, (arguments.samples, arguments.tokens), generator=generator)
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part.clone()}
        for part in ids.split(arguments.batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--output", type=Path, required=True)
    add("--layers", type=int, default=32)
    add("--hidden", type=int, default=4096)
    add("--intermediate", type=int, default=11008)
    add("--heads", type=int, default=32)
    add("--vocabulary", type=int, default=32000)
    add("--samples", type=int, default=64)
    add("--tokens", type=int, default=700, help="of each sample")
    add("--batch", type=int, default=4, help="samples a forward")
    add("--refinements", nargs="+", choices=REFINEMENTS, default=list(REFINEMENTS))
    add("--refinement-steps", type=int, help="default: the package's")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    logging.disable_progress_bar()

    stages = Stages(torch.device(arguments.device))
    with stages.stage("model"):
        model = random_model(arguments)
    batches = random_batches(arguments)
    results: dict[str, Any] = {
        "command": command_line("fit_time.py"),
        "environment": environment(arguments.device),
        "model": f"Llama with random weights, {arguments.layers} layers of {arguments.hidden}, {arguments.dtype}",
        "parameters": model.num_parameters(),
        "samples": arguments.samples,
        "tokens_per_sample": arguments.tokens,
        "rank_ratio": RATIO,
        "refinement_steps": arguments.refinement_steps or "default",
        "rows": stages.rows,
    }

    def fit(refinement: str, statistics: Any) -> None:
        steps = {} if arguments.refinement_steps is None else {"refinement_steps": arguments.refinement_steps}
        config = WSVDConfig(rank_ratio=RATIO, refinement=refinement, **({} if refinement == "none" else steps))
        with stages.stage(f"fit, refinement {refinement}"), fitted(model, config, statistics):
            pass
        write_text(arguments.output, json.dumps(results, indent=1) + "\n")

    with stages.stage("statistics"):
        statistics = collect_statistics(model, batches)
    for refinement in arguments.refinements:
        if refinement != "fisher":
            fit(refinement, statistics)
    if "fisher" in arguments.refinements:
        del statistics  # or both would be counted
        with stages.stage("statistics with fisher"):
            statistics = collect_statistics(model, batches, fisher=True)
        fit("fisher", statistics)


if __name__ == "__main__":
    main()
