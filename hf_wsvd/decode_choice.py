"""Which kernel serves the decode steps of a model, layer by layer, and why: `kernels.explain(model, cache)`."""

from __future__ import annotations

from itertools import groupby

import torch
from transformers import Cache, PreTrainedModel

from .cache import model_cache_config
from .cache_layers import StoredMixin
from .call import WSVD_FUNCTIONS, key_norm_module
from .decode_operands import norm_obstacle
from .decoder import DecoderAttention, decoder_attentions, decoder_of
from .kernels import Choice, explain
from .kernels.dispatch import DecodeStep, choose_for
from .latent_layers import LatentMixin
from .quantizer_config import WHOLE_LAYER, CacheConfig, LayerStorage
from .storage import make_store


def explain_model(
    model: PreTrainedModel, cache: Cache | None = None, capability: tuple[int, int] | None = None
) -> str:
    """One line a group of neighbouring decoder layers that are alike, for a step of one token.

    Args:
        cache: the one that the step would use, empty or not; None for one that the model makes by itself.
        capability: of a CUDA device with Triton to choose for in place of the model's, such as (9, 0); None for none.

    Raises:
        ValueError: a cache of another kind, a capability that is no pair of whole numbers.
    """
    attentions = decoder_attentions(model)
    if not isinstance(cache, Cache | None):
        raise ValueError(f"kernels.explain: cache={type(cache).__name__} is not allowed; allowed: a Cache or None")
    if capability is not None and not (
        isinstance(capability, tuple) and [type(number) for number in capability] == [int, int]
    ):
        raise ValueError(
            f"kernels.explain: capability={capability!r} is not allowed; allowed: a pair such as (9, 0), or None"
        )
    lines = []
    choices = [(attention.layer, layer_choice(model, attention, cache, capability)) for attention in attentions]
    for choice, group in groupby(choices, key=lambda entry: entry[1]):
        numbers = [number for number, _ in group]
        named = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        lines.append(f"{named}: {choice.kernel} ({choice.reason})")
    return "\n".join(lines)


def layer_choice(
    model: PreTrainedModel,
    attention: DecoderAttention,
    cache: Cache | None,
    capability: tuple[int, int] | None = None,
) -> Choice:
    """The kernel of one layer's step of one token."""
    module = attention.module
    binding = getattr(module, "_wsvd", None)
    latent = binding is not None and binding.layout is not None
    storage = layer_storage(model, attention, cache, latent)
    obstacle = None
    if module.config._attn_implementation not in WSVD_FUNCTIONS:
        obstacle = f"the attention function is {module.config._attn_implementation!r}"
    elif storage is None:
        obstacle = "the cache keeps its keys and values by itself"
    elif not latent and storage.whole:
        obstacle = "keys and values are neither latents nor packed"
    elif binding is None or not binding.handles:
        obstacle = f"no trial has shown that {type(module).__name__} can read packed keys and values"
    forms: tuple = ()
    if obstacle is None:
        obstacle, forms = stored_forms(storage, attention, latent, decoder_of(model).dtype)
    norm = "none" if not latent else binding.layout.norm
    if obstacle is None and norm != "none":
        obstacle = norm_obstacle(norm, key_norm_module(module), binding)
    step = DecodeStep(
        device=module.k_proj.weight.device,
        dtype=decoder_of(model).dtype,
        query_tokens=1,
        query_heads=attention.heads * getattr(module, "num_key_value_groups", 1),
        heads=attention.heads,
        head_dim=attention.head_dim,
        rotated=latent and binding.layout.rotation != "none",
        bias=latent and module.k_proj.bias is not None,
        norm=norm != "none",
        interleaved=latent and binding.layout.rotation not in ("none", "halves"),
        softcap=getattr(module.config, "attn_logit_softcapping", None) is not None,
        obstacle=obstacle,
        capability=capability,
        forms=forms,
    )
    return choose_for(step)


def layer_storage(
    model: PreTrainedModel, attention: DecoderAttention, cache: Cache | None, latent: bool
) -> LayerStorage | None:
    """How a layer's tokens are kept; None in a layer of a cache that is not ours and would not become so."""
    if cache is None or len(cache.layers) <= attention.layer:
        if latent:
            return attention.module._wsvd.storage
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        return (model_cache_config(model) or CacheConfig()).storage(attention.layer, layers, False)
    layer = cache.layers[attention.layer]
    if isinstance(layer, LatentMixin | StoredMixin):
        return getattr(layer, "storage", WHOLE_LAYER)
    return None if layer.is_initialized else layer_storage(model, attention, None, latent)


def stored_forms(
    storage: LayerStorage, attention: DecoderAttention, latent: bool, dtype: torch.dtype
) -> tuple[str | None, tuple[tuple[int, str, int, int], ...]]:
    """Why kernels cannot read a layer of this storage, and `DecodeStep.forms` where one run has all tokens."""
    forms = []
    for side in ("key", "value"):
        width = getattr(attention.module, f"{side[0]}_proj").width if latent else attention.head_dim
        store = make_store(getattr(storage, side), side, attention.heads, width, dtype)
        obstacle = store.obstacle()
        if obstacle is not None:
            return obstacle, ()
        if storage.by_class:
            continue
        store.append(torch.zeros(1, attention.heads, 1, width, dtype=dtype))
        forms += [(run.stored.width, run.stored.code, run.stored.bits, run.stored.groups) for run in store.runs()]
    return None, tuple(forms) if len(forms) == 2 else ()


def register_explanation() -> None:
    """Make `kernels.explain` know models."""
    explain.register(PreTrainedModel, explain_model)
