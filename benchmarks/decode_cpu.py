"""One decode step of the embedded model on a CPU: stock cache with dense keys and values against latent caches.

    python benchmarks/decode_cpu.py --output docs/results/decode_cpu.json

The models take turns, so that a slow minute of the machine hits all of them; a model's number is the median over turns
of its median step.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_wsvd import WSVDConfig, compress
from hf_wsvd.assets import demo_model_path
from hf_wsvd.calibration import collect_statistics, default_calibration
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.latency import decode_latency
from hf_wsvd.files import write_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048, help="cached tokens")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    path = demo_model_path()
    dense = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    moments = collect_statistics(dense, default_calibration(dense, AutoProcessor.from_pretrained(path), samples=16))
    models = {"dense, DynamicCache": dense}
    for ratio in arguments.ratios:
        config = WSVDConfig(rank_ratio=ratio, rank_allocation="uniform", refinement="none")
        models[f"WSVD {ratio:g}"] = compress(copy.deepcopy(dense), config, statistics=moments)
    steps: dict[str, list[float]] = {label: [] for label in models}
    for _ in range(arguments.turns):
        for label, model in models.items():
            steps[label].append(decode_latency(model, arguments.context, repeats=1).step)
    reference = statistics.median(steps["dense, DynamicCache"])
    results = {
        "command": shlex.join(["python", "benchmarks/decode_cpu.py", *sys.argv[1:]]),
        "environment": environment(),
        "model": "the embedded model, fp32, one sequence, steps not compiled",
        "context": arguments.context,
        "rows": [
            {
                "label": label,
                "step_ms": 1e3 * statistics.median(times),
                "fastest_turn_ms": 1e3 * min(times),
                "slowest_turn_ms": 1e3 * max(times),
                "speedup": reference / statistics.median(times),
            }
            for label, times in steps.items()
        ],
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
