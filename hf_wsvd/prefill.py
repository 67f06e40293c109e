"""Long prompts go through the decoder in pieces: activations of one piece at a time, the same results."""

from __future__ import annotations

import inspect
import threading
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cache_layers import StoredMixin
from .compat import CACHE_ARGUMENT, CACHE_ARGUMENTS
from .decoder import decoder_attentions, decoder_of
from .image_tokens import current_image_tokens, set_image_tokens, teller_of
from .latent_layers import LatentMixin
from .prompt_pieces import Prompt
from .quantizer_config import WHOLE_LAYER, LayerStorage, StorageSpec


# Tokens of all sequences together that go through the decoder at once, but never fewer of a sequence than the second:
# every piece expands the latents of those before it, which many short pieces would do too often.
PIECE_TOKENS = 4096
SHORTEST_PIECE = 1024
STOCK_CACHES = (Cache, DynamicCache, StaticCache)
STOCK_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
LAYER_TYPES = ("full_attention", "sliding_attention")
# Outputs of the decoder beside the last hidden states that have an entry a token.
OTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class PrefillHook:
    """What the hooks of a decoder know.

    Attributes:
        tokens: of a sequence in a piece; "auto", or None for prompts that stay whole.
        parameters: names of the forward's parameters, in order.
        storages: of layers that hold latents, by number; what their empty stock layers will become.
    """

    def __init__(self, parameters: list[str]):
        self.tokens: int | str | None = "auto"
        self.parameters = parameters
        self.storages: dict[int, LayerStorage] = {}
        self.handles: list[Any] = []


_local = threading.local()


def set_prefill_chunk(model: PreTrainedModel, tokens: int | str | None = "auto") -> None:
    """Choose how a model's long prompts go through its decoder.

    Args:
        model: one that is compressed, or that a `WSVDCache` is used with.
        tokens: "auto", the default of every model: in pieces of 4,096 tokens of all sequences together and at least
            1,024 of each, wherever that changes no result. A number: in pieces of so many tokens of each sequence,
            even where a packed cache then has later pieces read what is stored of earlier ones (`prefill="exact"`).
            None: whole.

    Raises:
        ValueError: another value, or a model whose decoder takes no cache.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"set_prefill_chunk: model must be a transformers model, got {type(model).__name__}")
    number = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0
    if not (number or tokens is None or tokens == "auto"):
        raise ValueError(f"set_prefill_chunk: tokens={tokens!r} is not allowed; allowed: 'auto', None, or at least 1")
    install_prefill_hook(model)
    hook = getattr(decoder_of(model), "_wsvd_prefill", None)
    if hook is None:
        raise ValueError(f"set_prefill_chunk: the decoder of {type(model).__name__} takes no `{CACHE_ARGUMENT}`")
    hook.tokens = tokens


def install_prefill_hook(model: PreTrainedModel) -> None:
    """Let the decoder cut long prompts, where its forward takes a cache; what was chosen before stays chosen."""
    decoder = decoder_of(model)
    if not hasattr(decoder, "_wsvd_prefill"):
        parameters = list(inspect.signature(decoder.forward).parameters)
        if CACHE_ARGUMENT not in parameters:
            return
        hook = decoder._wsvd_prefill = PrefillHook(parameters)
        hook.handles = [
            decoder.register_forward_pre_hook(run_first_pieces, with_kwargs=True),
            decoder.register_forward_hook(join_pieces, with_kwargs=True, always_call=True),
        ]
    bindings = (getattr(attention.module, "_wsvd", None) for attention in decoder_attentions(model))
    decoder._wsvd_prefill.storages = {b.layer: b.storage for b in bindings if b is not None and b.layout is not None}


def remove_prefill_hook(model: PreTrainedModel) -> None:
    """Undo `install_prefill_hook`; nothing where it was not called."""
    hook = vars(decoder_of(model)).pop("_wsvd_prefill", None)
    for handle in hook.handles if hook is not None else ():
        handle.remove()


def run_first_pieces(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pre-hook of the decoder: run all pieces of a long prompt but the last, which the forward itself is left with.

    The hidden states of the first ones wait at the cache: other hooks may exchange every tensor that is given.
    """
    hook: PrefillHook = decoder._wsvd_prefill
    if torch.compiler.is_compiling() or getattr(_local, "running", None) is decoder:
        return None
    given = {**dict(zip(hook.parameters, args)), **kwargs}
    take_earlier(given)  # of a forward that was interrupted by hand, after which no hook ran
    if hook.tokens is None or decoder.training or torch.is_grad_enabled():
        return None
    cuts = prompt = None
    size = piece_size(hook, given)
    if size is not None:
        given = with_cache(decoder, given)
        prompt = prompt_to_cut(decoder, given)
        cuts = prompt.cuts(size) if prompt is not None else None
    if cuts is None or len(cuts) < 3:
        return None
    classes, teller = current_image_tokens(), teller_of()
    if classes is not None and not classes.are_of(prompt.batch, prompt.tokens):
        return None
    earlier, before = [], getattr(_local, "running", None)
    _local.running = decoder
    try:
        for start, stop in pairwise(cuts[:-1]):
            set_image_tokens(None if classes is None else classes.part(start, stop), teller)
            earlier.append(decoder(**prompt.piece(start, stop))[0])
        last = prompt.piece(*cuts[-2:])
        cache_among(last)._wsvd_earlier = (earlier, classes, teller)
        set_image_tokens(None if classes is None else classes.part(*cuts[-2:]), teller)
    except BaseException:
        set_image_tokens(classes, teller)
        raise
    finally:
        _local.running = before
    return (), last


def join_pieces(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the decoder, called after an exception too: put the hidden states of all pieces together."""
    if torch.compiler.is_compiling():
        return None
    found = take_earlier(kwargs)
    if found is None:
        return None
    earlier, classes, teller = found
    set_image_tokens(classes, teller)
    if output is None:
        return None
    joined = torch.cat([*earlier, output[0]], dim=1)
    if isinstance(output, tuple):
        return (joined, *output[1:])
    output.last_hidden_state = joined
    return output


def cache_among(given: dict[str, Any]) -> Any:
    """The cache among the arguments of a forward; None where none is given."""
    return next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)


def take_earlier(given: dict[str, Any]) -> tuple | None:
    """What `run_first_pieces` left at the cache of a forward, which has it no longer."""
    cache = cache_among(given)
    return vars(cache).pop("_wsvd_earlier", None) if isinstance(cache, Cache) else None


def piece_size(hook: PrefillHook, given: dict[str, Any]) -> int | None:
    """Tokens of a sequence that go through the decoder at once; None for a forward that is short enough."""
    inputs = given.get("inputs_embeds")
    inputs = given.get("input_ids") if inputs is None else inputs
    if inputs is None or inputs.ndim < 2:
        return None
    batch, tokens = inputs.shape[:2]
    size = max(SHORTEST_PIECE, PIECE_TOKENS // max(batch, 1)) if hook.tokens == "auto" else hook.tokens
    return size if tokens > size else None


def with_cache(decoder: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward with the cache that the decoder would make by itself."""
    used = given.get("use_cache")
    used = getattr(decoder.config, "use_cache", True) if used is None else used
    if not used or cache_among(given) is not None:
        return given
    return {**given, CACHE_ARGUMENT: DynamicCache(config=decoder.config)}


def prompt_to_cut(decoder: nn.Module, given: dict[str, Any]) -> Prompt | None:
    """The prompt of a forward that can go in pieces without another result; None for any other."""
    cache = cache_among(given)
    config, hook = decoder.config, decoder._wsvd_prefill
    if any(given.get(name) or getattr(config, name, False) for name in OTHER_OUTPUTS):
        return None
    if cache is None or not getattr(config, "is_causal", True) or not reads_in_pieces(decoder, cache):
        return None
    storages = storages_of(decoder, cache)
    if cache.is_compileable and any(storage.by_class for storage in storages):
        return None  # the first tokens settle how its slots are shared out
    prompt = Prompt(given, cache)
    if hook.tokens == "auto" and prompt.past == 0 and not all(map(order_is_free, storages)):
        return None
    return prompt if prompt.can_be_cut() else None


def reads_in_pieces(decoder: nn.Module, cache: Any) -> bool:
    """Whether a cache is of ours, or becomes it, and holds keys and values alone.

    States of linear attention are whole only after a whole prompt, in many of the models that have them.
    """
    from .cache import WSVDCache

    if type(cache) not in STOCK_CACHES and not isinstance(cache, WSVDCache):
        return False
    if any(kind not in LAYER_TYPES for kind in getattr(decoder.config, "layer_types", None) or ()):
        return False
    ours = [isinstance(layer, LatentMixin | StoredMixin) for layer in cache.layers]
    known = all(own or type(layer) in STOCK_LAYERS for own, layer in zip(ours, cache.layers))
    return known and (isinstance(cache, WSVDCache) or any(ours) or bool(decoder._wsvd_prefill.storages))


def storages_of(decoder: nn.Module, cache: Cache) -> list[LayerStorage]:
    """How the layers of an empty cache are or will be kept."""
    latent = decoder._wsvd_prefill.storages
    numbers = range(max(len(cache.layers), max(latent, default=-1) + 1))
    present = dict(enumerate(cache.layers))
    return [getattr(present.get(n), "storage", None) or latent.get(n, WHOLE_LAYER) for n in numbers]


def order_is_free(storage: LayerStorage) -> bool:
    """Whether a first prompt reads the same from a layer in one piece and in several."""
    if storage.whole:
        return True
    return storage.prefill == "stored" and not any(map(remembers_order, (storage.key, storage.value)))


def remembers_order(spec: StorageSpec) -> bool:
    """Whether a token takes another form in other company: windows, groups of KIVI, scales of the first tokens."""
    parts = [part for part, _ in spec.guards] + ([] if spec.text is None else [spec.text])
    own = spec.scheme in ("kivi", "fp8") or spec.sink_length > 0 or spec.residual_length > 0
    return own or any(map(remembers_order, parts))
