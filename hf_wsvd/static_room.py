"""Whether a cache of fixed size has room on its device: asked before it is allocated."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .cache_choice import CacheChoice, GenerateCall
from .decoder import decoder_attentions
from .estimate import estimate_memory, human_bytes


def check_length(model: PreTrainedModel, call: GenerateCall) -> None:
    """ValueError for more tokens than the model has positions for.

    Models whose positions do not end there are let through: those whose rotation stretches with the text (dynamic
    NTK), and those with positions of several axes, which advance slower than tokens do. A length that stands in the
    model's own generation config, or nowhere, is the most that it may become and asked for by nobody: there the
    prompt alone counts.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None or call.prompt is None or rope.get("rope_type") == "dynamic" or "mrope_section" in rope:
        return
    name = "max_length" if call.settings.max_new_tokens is None else "max_new_tokens"
    asked = getattr(call.settings, name) != getattr(model.generation_config, name)
    tokens = call.tokens if asked else call.prompt + 1
    if tokens > limit:
        raise ValueError(
            f"generate: a prompt of {call.prompt:,} tokens and what is to follow are {tokens:,} tokens, and the "
            f"model has {limit:,} positions (max_position_embeddings); allowed: max_new_tokens up to "
            f"{max(0, limit - call.prompt):,}"
        )


def check_room(model: PreTrainedModel, choice: CacheChoice) -> None:
    """ValueError, with the estimate, for a new cache that does not fit into the memory that its device has free."""
    free = free_bytes(model.device)
    if free is None or most_bytes(model, choice) <= free:
        return
    estimate = estimate_memory(model, choice.tokens, choice.batch, max_cache_len=choice.tokens)
    if estimate.cache_bytes > free:
        raise ValueError(
            f"generate: the cache does not fit: {estimate}; {model.device} has {human_bytes(free)} free. Lower "
            "max_new_tokens or the batch, or let the cache grow as it is needed with cache_implementation='dynamic'"
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that torch can still allocate on a CUDA device; None where nobody knows."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def most_bytes(model: PreTrainedModel, choice: CacheChoice) -> int:
    """More than any cache of ours takes: dense keys and values in fp32, and as much again beside them."""
    numbers = sum(2 * attention.heads * attention.head_dim for attention in decoder_attentions(model))
    return 8 * numbers * choice.batch * choice.tokens
