"""What benchmarks/generate.py compares, and how one of them is measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, PreTrainedModel

from generate_models import dense_model, latent_model
from hf_wsvd import free_generate_cache
from hf_wsvd.evaluate.latency import text_tokens


class Variant(NamedTuple):
    """A cache, and the model that decodes with it.

    Attributes:
        compressed: whether the model is compressed by hf_wsvd.
        cache: `WSVDConfig.cache` of a compressed model.
        latent: whether it has latents.
        options: of `generate`.
        library: that has to be there.
    """

    compressed: bool
    cache: dict[str, Any] | None = None
    latent: bool = True
    options: Mapping[str, Any] = MappingProxyType({})
    library: str | None = None


def quantized(backend: str) -> dict[str, Any]:
    """Options of `generate` for the 4-bit cache of transformers."""
    return {"cache_implementation": "quantized", "cache_config": {"backend": backend, "nbits": 4}}


VARIANTS = {
    "dynamic": Variant(False),
    "static": Variant(False, options={"cache_implementation": "static"}),
    "quantized-hqq": Variant(False, options=quantized("hqq"), library="hqq"),
    "quantized-quanto": Variant(False, options=quantized("quanto"), library="optimum.quanto"),
    "latent": Variant(True),
    "latent-int8": Variant(True, {"bits": 8}),
    "latent-int4": Variant(True, {"bits": 4}),
    "packed-int8": Variant(True, {"bits": 8}, latent=False),
    "latent-dynamic": Variant(True, options={"cache_implementation": "dynamic"}),
}


def make_model(name: str, variant: Variant, device: torch.device, dtype: torch.dtype, ratio: float) -> PreTrainedModel:
    """The model of a variant."""
    if not variant.compressed:
        return dense_model(name, device, dtype)
    return latent_model(name, device, dtype, ratio if variant.latent else None, variant.cache)


class FirstToken(LogitsProcessor):
    """Takes the time at which the scores of the first token are there."""

    def __init__(self, device: torch.device):
        self.device, self.time = device, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.time:
            self.time = now(self.device)
        return scores


def now(device: torch.device) -> float:
    """Seconds on a clock, the device idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def generate(model: PreTrainedModel, batch: int, tokens: int, count: int, options: Mapping[str, Any]) -> list[float]:
    """Seconds to the first token and seconds a token after it; of `tokens` tokens, the last `count` are generated."""
    prompt, first = text_tokens(model, (batch, tokens - count)), FirstToken(model.device)
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "logits_processor": [first]}
    begin = now(model.device)
    model.generate(**given, max_new_tokens=count, do_sample=False, **options)
    return [first.time - begin, (now(model.device) - first.time) / (count - 1)]


def measure(
    model: PreTrainedModel, variant: Variant, batch: int, tokens: int, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Medians over `repeats` of the time to the first token and of that a token after it, and the most memory."""
    device = model.device
    generate(model, batch, tokens, new_tokens, variant.options)  # compiles, and settles how large a cache is
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = zip(*(generate(model, batch, tokens, new_tokens, variant.options) for _ in range(repeats)))
    first, step = (statistics.median(column) for column in times)
    return {
        "ms_per_token": 1e3 * step,
        "tokens_per_second": batch / step,
        "ttft_ms": 1e3 * first,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
    }


def fits(model: PreTrainedModel, variant: Variant, batch: int, tokens: int) -> bool:
    """Whether a batch can be generated with sequences of `tokens`."""
    try:
        generate(model, batch, tokens, 2, variant.options)
        return True
    except (torch.cuda.OutOfMemoryError, ValueError) as error:
        if isinstance(error, ValueError) and "does not fit" not in str(error):
            raise
        return False
    finally:
        release(model)


def largest_batch(fits: Callable[[int], bool], most: int = 1024) -> int:
    """The largest batch that fits, to 1/16 of itself; 0 where one sequence does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def release(model: PreTrainedModel) -> None:
    """Free what a generation left."""
    free_generate_cache(model)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
