"""`generate` from end to end: latent caches against the caches of transformers, in time and memory.

    python benchmarks/generate.py --output docs/results/generate_h200.json --batch 16
    python benchmarks/generate.py --output docs/results/generate_h200.json --largest-batch
    python benchmarks/generate.py --output docs/results/generate_cpu.json --model embedded --device cpu \
        --dtype float32 --tokens 2048 --caches dynamic latent --turns 9

Every cache is measured alone on the device, after a generation that compiles. Rows are added to the file; those of the
same case are replaced. A cache that does not fit, or whose library is missing, leaves a row that says so. Where caches
take turns (`--turns`), all models are loaded at once: for machines whose speed changes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from generate_measure import VARIANTS, fits, largest_batch, make_model, measure, release
from generate_models import MODELS
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from record import command_line


def with_rows(output: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into a file, over those of the same case."""
    names = ("device", "model", "batch", "tokens", "cache", "measure")
    found = json.loads(output.read_text())["rows"] if output.exists() else []
    new = {tuple(row[name] for name in names) for row in rows}
    kept = [row for row in found if tuple(row[name] for name in names) not in new]
    write_text(output, json.dumps({"rows": kept + rows}, indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="llava-1.5-7b")
    parser.add_argument("--caches", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence at its end")
    parser.add_argument("--new-tokens", type=int, default=64, help="of them generated")
    parser.add_argument("--rank-ratio", type=float, default=0.5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, help="caches take turns, so often, with one repeat each")
    parser.add_argument("--largest-batch", action="store_true", help="how many sequences fit, in place of times")
    found = parser.parse_args(arguments)
    if not 2 <= found.new_tokens < found.tokens:
        parser.error(
            f"--new-tokens {found.new_tokens} is not allowed; allowed: 2 to {found.tokens - 1}, below --tokens"
        )
    return found


def row_of(arguments: argparse.Namespace, name: str, **found: Any) -> dict[str, Any]:
    """A row of the results."""
    variant = VARIANTS[name]
    compiled = arguments.device.type == "cuda" and (
        variant.options.get("cache_implementation") == "static" or (variant.compressed and not variant.options)
    )
    return {
        "device": environment(arguments.device)["device"],
        "model": arguments.model,
        "batch": None if arguments.largest_batch else arguments.batch,
        "tokens": arguments.tokens,
        "cache": name,
        "measure": "largest batch" if arguments.largest_batch else "time",
        "compiled": compiled,
        **found,
        "dtype": str(arguments.dtype).removeprefix("torch."),
        "rank_ratio": arguments.rank_ratio if variant.compressed and variant.latent else None,
        "environment": environment(arguments.device),
        "command": command_line("generate.py"),
    }


def alone(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """One cache, whose model has the device for itself."""
    variant = VARIANTS[name]
    if variant.library is not None and importlib.util.find_spec(variant.library.partition(".")[0]) is None:
        return {"error": f"{variant.library} is not installed"}
    torch._dynamo.reset()
    gc.collect()
    model = make_model(arguments.model, variant, arguments.device, arguments.dtype, arguments.rank_ratio)
    try:
        if arguments.largest_batch:
            return {"largest_batch": largest_batch(lambda batch: fits(model, variant, batch, arguments.tokens))}
        return measure(model, variant, arguments.batch, arguments.tokens, arguments.new_tokens, arguments.repeats)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    except ValueError as error:
        return {"error": str(error)}
    finally:
        release(model)


def in_turns(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All caches in turns: medians over the turns, and of them as shares of the first cache's."""
    models = {
        name: make_model(arguments.model, VARIANTS[name], arguments.device, arguments.dtype, arguments.rank_ratio)
        for name in arguments.caches
    }
    sizes = (arguments.batch, arguments.tokens, arguments.new_tokens)
    turns = [
        {name: measure(model, VARIANTS[name], *sizes, repeats=1) for name, model in models.items()}
        for _ in range(arguments.turns)
    ]
    rows = {}
    for name in models:
        rows[name] = {
            key: statistics.median(turn[name][key] for turn in turns) for key in turns[0][name] if key != "peak_gb"
        }
        shares = [turn[name]["tokens_per_second"] / turn[arguments.caches[0]]["tokens_per_second"] for turn in turns]
        rows[name] |= {"share_of_first": statistics.median(shares), "shares_of_first": shares}
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.turns:
        with_rows(options.output, [row_of(options, name, **found) for name, found in in_turns(options).items()])
        return
    for name in options.caches:
        row = row_of(options, name, **alone(options, name))
        with_rows(options.output, [row])
        print(json.dumps({key: value for key, value in row.items() if key != "environment"}))


if __name__ == "__main__":
    main()
