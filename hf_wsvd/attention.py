"""Binding of compressed attention layers: hooks around their forward, and the attention function they call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .call import LatentCall, active_call, set_active_call
from .compat import cache_of
from .decoder import decoder_attentions, decoder_of
from .kernels import latent_attention
from .quantizer_config import WHOLE_LAYER, KeyLayout, LayerStorage
from .rope import half_rows
from .upgrade import latent_layer


logger = logging.get_logger("hf_wsvd")

# Keyword arguments of attention functions that change the scores in ways latent attention does not know.
DENSE_ONLY = ("s_aux", "position_bias")


class Binding:
    """What the hooks of one attention layer know of it. Holds no module, so that copies of a model stay apart."""

    def __init__(self, layer: int, layout: KeyLayout | None, row_group: Any, storage: LayerStorage):
        self.layer = layer
        self.layout = layout
        self.storage = storage
        self.row_group = row_group
        self.handles: list = []


def bind(attention: nn.Module, layer: int, layout: KeyLayout | None, storage: LayerStorage = WHOLE_LAYER) -> None:
    """Hook a compressed attention layer, so that its cache layer gets latents (`layout` None: dense keys).

    Args:
        storage: of the latents in a cache that the model makes by itself.
    """
    row_group = getattr(attention, "layer_type", getattr(attention, "is_sliding", None))
    binding = Binding(layer, layout, row_group, storage)
    if layout is not None:
        binding.handles = [
            attention.register_forward_pre_hook(open_call, with_kwargs=True),
            attention.register_forward_hook(close_call, always_call=True),
        ]
    attention._wsvd = binding


def unbind(attention: nn.Module) -> None:
    """Undo `bind`."""
    for handle in attention._wsvd.handles:
        handle.remove()
    del attention._wsvd


def bound_layers(model: PreTrainedModel) -> set[int]:
    """Numbers of the decoder layers whose cache holds latents."""
    bindings = (getattr(a.module, "_wsvd", None) for a in decoder_attentions(model))
    return {b.layer for b in bindings if b is not None and b.layout is not None}


def open_call(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of `self_attn`: open the channel to the cache layer of this call."""
    binding = attention._wsvd
    cos = sin = row_key = None
    if binding.layout.rotation != "none":
        cos, sin = (half_rows(rows, binding.layout.rotation) for rows in kwargs["position_embeddings"])
        row_key = (str(cos.device), binding.row_group)
    layer = latent_layer(cache_of(kwargs), binding.layer, row_key, binding.storage)
    set_active_call(None if layer is None else LatentCall(attention, binding.layout, layer, cos, sin))


def close_call(attention: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of `self_attn`, called after an exception too."""
    set_active_call(None)


def attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function "wsvd": latents where the current call says so, else `base` on ordinary keys and values.

    Args:
        base: "sdpa" or "eager".
        query, key, value: `[B, Hq or Hkv, N or S, D]` as every attention function of transformers gets them.

    Returns:
        `[B, N, Hq, D]` and the attention weights where `base` gives them.
    """
    call = active_call()
    if isinstance(call, LatentCall) and call.attention is module and call.cached and call.reads_latents():
        dense = dropout or kwargs.get("output_attentions") or any(kwargs.get(name) is not None for name in DENSE_ONLY)
        if not call.layer_was_empty and (key is not call.handed[0] or value is not call.handed[1]):
            raise RuntimeError(f"{type(module).__name__} changes cached keys or values: it cannot work on latents")
        if not (call.layer_was_empty or dense):
            out = latent_attention(
                query,
                *call.cached,
                attention_mask,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap=kwargs.get("softcap"),
                **call.key_norms(),
            )
            return out, None
        if not call.layer_was_empty:
            key, value = call.expand()
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[-2]:  # first tokens of a static cache
        attention_mask = attention_mask[..., : key.shape[-2]]
    return base_attention(base, module)(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


def base_attention(base: str, module: nn.Module) -> Callable:
    """The dense attention function; "eager" is not registered but stands in each modeling file."""
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def implementation_for(model: PreTrainedModel) -> str:
    """ "wsvd" (over sdpa) or "wsvd_eager", by what the decoder uses and needs.

    A softcap on the scores forces eager: sdpa of transformers before 5.21 drops it silently.
    """
    config = decoder_of(model).config
    present = config._attn_implementation
    eager = present in ("eager", "wsvd_eager") or getattr(config, "attn_logit_softcapping", None) is not None
    name = "wsvd_eager" if eager else "wsvd"
    if present not in ("sdpa", "eager", "wsvd", "wsvd_eager"):
        logger.warning(f"hf_wsvd: attn_implementation={present!r} of the decoder is replaced by {name!r}")
    return name


def register_attention() -> None:
    """Make "wsvd" and "wsvd_eager" known to transformers. Without a mask function no mask would be built at all."""
    for name, base, mask in (("wsvd", "sdpa", sdpa_mask), ("wsvd_eager", "eager", eager_mask)):
        AttentionInterface.register(name, partial(attend, base))
        AttentionMaskInterface.register(name, mask)
