"""The fast evaluator beside the real packed cache, question by question and byte by byte."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cache_settings import dense_elements
from headguard_choices import Base, Choice, guarded_heads
from headguard_evaluator import Evaluator
from headguard_heads import Heads, fill
from headguard_questions import QuestionBatch
from headguard_rows import bits_of
from headguard_scores import Scores
from hf_wsvd import WSVDCache
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.image_tokens import image_tokens
from hf_wsvd.quantizer_config import CacheConfig


HELD = ("payload", "scales", "window")  # of `memory_report`: what `Bits.whole_cache` counts


def check_choices(selectors: list[str], seed: int) -> Iterator[Choice]:
    """Cells of every scheme, fraction, protection and number of guard bits in turns."""
    selector = next((name for name in selectors if name != "random"), "random")
    bases = [Base("hadamard", 2, 2), Base("minmax", 2, 2), Base("kivi", 2, 2), Base("minmax", 2, 2, 16)]
    settings = [(1 / 8, "k", 16), (1 / 4, "kv", 16), (1 / 4, "kv", 4), (1 / 2, "k", 8)]
    for shift in range(len(settings)):
        for number, base in enumerate(bases):
            yield Choice(base, selector, *settings[(number + shift) % len(settings)], seed)


def check(
    cache: str, heads: Heads, evaluator: Evaluator, scores: Scores, selectors: list[str], seed: int, count: int
) -> list[dict[str, Any]]:
    """`count` cells: share of questions with equal results, both accuracies, bits of both."""
    entries = []
    for choice in islice(check_choices(selectors, seed), count):
        guard_map = scores.guard_map(choice)
        config = CacheConfig(**{**choice.base.config.to_dict(), "guard_map": guard_map})
        try:
            packed = heads.packed(config)
        except ValueError:  # group sizes that the latents' ranks do not allow
            continue
        guard = None if choice.guard_bits == 16 else heads.packed(choice.base.config, choice.guard_bits)
        fast = evaluator.right(packed, guarded_heads(guard_map), guard)
        real, bits = really_right(heads.model, heads.batches, config)
        entries.append(
            {
                "cache": cache,
                **choice.row,
                "questions": len(fast),
                "equal": float((fast == real).double().mean()),
                "accuracy": float(fast.double().mean()),
                "accuracy_of_cache": float(real.double().mean()),
                "whole_cache_bits_per_element": bits_of(heads, packed, guarded_heads(guard_map), guard).whole_cache,
                "bits_of_cache": bits,
            }
        )
    return entries


@torch.no_grad()
def really_right(model: PreTrainedModel, batches: list[QuestionBatch], config: CacheConfig) -> tuple[Tensor, float]:
    """bool `[questions]` by a `WSVDCache`, and the bits of a number that it holds after the prompts."""
    right, held, elements = [], 0, 0
    for batch in batches:
        cache = WSVDCache(model, cache_config=config)
        images = torch.zeros(batch.labels.shape, dtype=torch.bool, device=batch.labels.device)
        images[:, batch.image] = True
        with image_tokens(images[:, : batch.prompt]):
            fill(model, batch, cache)
        report = cache.memory_report()
        held += sum(report.sum(kind) for kind in HELD)
        elements += dense_elements(model, len(images) * batch.prompt)
        with image_tokens(images[:, batch.prompt :]):
            states = model.get_decoder()(
                inputs_embeds=batch.embeds[:, batch.prompt :], use_cache=True, **{CACHE_ARGUMENT: cache}
            ).last_hidden_state[batch.counted]
        following = torch.nn.functional.pad(batch.labels[:, batch.prompt + 1 :], (0, 1))[batch.counted]
        missed = model.get_output_embeddings()(states).argmax(-1) != following
        rows = batch.counted.nonzero()[:, 0]
        right.append(torch.zeros(len(images), device=images.device).index_add_(0, rows, missed.float()) == 0)
    return torch.cat(right).cpu(), 8 * held / elements
