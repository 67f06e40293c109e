"""Decode time of packed caches with guarded heads beside the same caches without.

    python benchmarks/head_guard_decode.py --threads 1 --output docs/results/head_guard_decode_cpu.json
    python benchmarks/head_guard_decode.py --device cuda --dtype bfloat16 --output head_guard_decode_cuda.json

Random weights in the shape of six layers of SmolLM2-135M as the decoder of a LLaVA; caches filled with random keys
and values, most of which are said to be of images, then steps of a token. All caches are in one process and take turns
token by token, so that a slow minute of the machine hits all. `ratio` is the median over steps of a step's time over
that of the same scheme without guards, in which text is kept in the model's dtype too ("image") or packed too ("all").
"""

import argparse
import json
import statistics
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

import hf_wsvd
from cache_bytes import SIX_LAYERS, now
from hf_wsvd import WSVDCache
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.quantizer_config import GuardMap
from record import command_line


SCHEMES = [("minmax", 2), ("minmax", 4), ("hadamard", 2), ("hadamard", 3), ("kivi", 2)]
FRACTIONS = (1 / 8, 1 / 2)
IMAGE_SHARE = 7 / 8  # of the prompt
WARMUP_STEPS = 3
LAYERS, HEADS = SIX_LAYERS["num_hidden_layers"], SIX_LAYERS["num_key_value_heads"]


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = random_llava(getattr(torch, arguments.dtype), torch.device(arguments.device))
    rows = []
    for scheme, bits in SCHEMES:
        for tokens in ("image", "all"):
            rows += measured(model, scheme, bits, tokens, arguments)
            for row in rows[-1 - len(FRACTIONS) :]:
                print(row["scheme"], bits, tokens, row["fraction"], f"{row['ms_per_token']:.1f} {row['ratio']:.3f}")
    results = {
        "command": command_line("head_guard_decode.py"),
        "environment": environment(arguments.device),
        "model": f"random weights in the shape of six layers of SmolLM2-135M, {arguments.dtype}",
        "prompt_tokens": arguments.prompt_tokens,
        "image_share": IMAGE_SHARE,
        "new_tokens": arguments.new_tokens,
        "rows": rows,
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def random_llava(dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The decoder of the measurements behind a vision tower that is never called."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIX_LAYERS), image_token_id=2)
    return LlavaForConditionalGeneration(config).to(device, dtype).eval()


def guard_map(fraction: float, tokens: str) -> GuardMap:
    """Keys and values of a share of all heads, spread over the layers."""
    heads: dict[int, dict[int, int]] = {}
    count = round(fraction * LAYERS * HEADS)
    for number in range(count):
        layer, head = divmod(number * LAYERS * HEADS // count, HEADS)
        heads.setdefault(layer, {})[head] = 16
    return GuardMap(key=heads, value=heads, num_key_value_heads=[HEADS] * LAYERS, tokens=tokens)


@torch.no_grad()
def measured(
    model: PreTrainedModel, scheme: str, bits: int, tokens: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row without guards and one for each fraction."""
    options: dict[str, Any] = {"scheme": scheme, "bits": bits}
    plain = {**options, "text_bits": 16} if tokens == "image" else options
    caches = {None: WSVDCache(model, **plain)}
    caches |= {share: WSVDCache(model, **options, guard_map=guard_map(share, tokens)) for share in FRACTIONS}
    device, dtype, count = model.device, model.dtype, arguments.prompt_tokens
    of_image = torch.zeros(1, count, dtype=torch.bool, device=device)
    of_image[:, 8 : 8 + int(IMAGE_SHARE * count)] = True
    shape = (1, HEADS, count, SIX_LAYERS["hidden_size"] // SIX_LAYERS["num_attention_heads"])
    for layer in range(LAYERS):
        keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        for cache in caches.values():
            with hf_wsvd.image_tokens(of_image):
                cache.update(keys, values, layer)
    token = torch.full((1, 1), 1000, device=device)
    times: dict[float | None, list[float]] = {share: [] for share in caches}
    for _ in range(WARMUP_STEPS + arguments.new_tokens):
        for share, cache in caches.items():
            start = now(device)
            model(**{"input_ids": token, "use_cache": True, CACHE_ARGUMENT: cache})
            times[share].append(now(device) - start)
    return [
        {
            "device": device.type,
            "scheme": scheme,
            "bits": bits,
            "tokens": tokens,
            "fraction": share,
            "guards": share is not None,
            "cache_bytes": cache.nbytes,
            "ms_per_token": 1e3 * statistics.median(times[share][WARMUP_STEPS:]),
            "ratio": statistics.median(
                own / base for own, base in zip(times[share][WARMUP_STEPS:], times[None][WARMUP_STEPS:])
            ),
        }
        for share, cache in caches.items()
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", required=True, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
