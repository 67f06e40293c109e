"""Time to first token and memory of a long prompt, by how it goes through the decoder: whole or in pieces.

    python benchmarks/prefill.py --output docs/results/prefill_cpu.json

A Llama with random weights, half of every head kept. Every row is a process of its own. Times on a CPU are those that
the process was given, so that other work on the machine does not count.
"""

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_wsvd import WSVDCache, WSVDConfig, compress, long_query, set_prefill_chunk
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text


def model_of(arguments: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.tokens,
    )
    dtype = getattr(torch, arguments.dtype)
    model = LlamaForCausalLM(config).eval().to(arguments.device)
    batches = [{"input_ids": torch.randint(3, 1000, (4, 256), device=arguments.device)}]
    config = WSVDConfig(rank_ratio=0.5, rank_allocation="uniform", refinement="none", self_check="none")
    return compress(model, config, calibration=batches).to(dtype)


@torch.no_grad()
def measure(arguments: argparse.Namespace, piece: int | None, workspace: int | None) -> dict[str, Any]:
    """The row of one way: pieces of `piece` tokens (None: whole), heads read within `workspace` bytes."""
    model, cuda = model_of(arguments), arguments.device.startswith("cuda")
    ids = torch.randint(3, 1000, (arguments.batch, arguments.tokens), device=arguments.device)
    set_prefill_chunk(model, piece)
    long_query.WORKSPACE_BYTES = workspace or long_query.WORKSPACE_BYTES
    seconds = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(arguments.repeats):
        cache = WSVDCache(model)
        clock = time.perf_counter if cuda else time.process_time
        start = clock()
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits.argmax().item()
        seconds.append(clock() - start)
    # On a CPU the highest mark of the process is that of the fit before.
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    return {
        "piece": piece,
        "workspace_bytes": long_query.WORKSPACE_BYTES,
        "ttft_s": statistics.median(seconds),
        "peak_bytes": peak,
        "cache_bytes": cache.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--pieces", type=int, nargs="+", default=[4096, 2048, 1024])
    parser.add_argument("--workspace", type=int, help="bytes; default: that of the library")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ways = [(piece, arguments.workspace) for piece in (None, *arguments.pieces)]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (arguments, *way)) for way in ways]
    results = {
        "command": shlex.join(["python", "benchmarks/prefill.py", *sys.argv[1:]]),
        "environment": environment(),
        "model": f"Llama, {arguments.layers} layers, width {arguments.width}, {arguments.heads} query and "
        f"{arguments.kv_heads} KV heads, {arguments.dtype}, latents at rank ratio 0.5",
        "batch": arguments.batch,
        "tokens": arguments.tokens,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
