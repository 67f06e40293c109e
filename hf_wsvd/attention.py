"""Binding of compressed attention layers: hooks around their forward, and the attention function they call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .cache_layers import StoredMixin
from .call import WSVD_FUNCTIONS, DenseCall, LatentCall, active_call, set_active_call
from .compat import cache_of
from .decode_operands import decode_parts, hold_addresses, key_norm_weights
from .decoder import decoder_attentions, decoder_of
from .kernels import fused_attention, latent_attention
from .kernels.dispatch import device_obstacle, kernels_can_run, needs_torch
from .latent_layers import LatentMixin
from .long_query import attend_in_portions
from .quantizer_config import WHOLE_LAYER, KeyLayout, LayerStorage
from .rope import half_rows
from .trial import layers_that_need_keys
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
        self.norm_kind: tuple | None = None  # of the key norm, once looked at: see `rms_norm_kind`
        self.on_trial = False
        self.needs_keys = False  # whether a trial has shown that kernels cannot read packed keys for it
        self.handles: list = []


def bind(attention: nn.Module, layer: int, layout: KeyLayout | None, storage: LayerStorage = WHOLE_LAYER) -> None:
    """Hook a compressed attention layer, so that its cache layer gets latents (`layout` None: dense keys).

    Args:
        storage: of the latents in a cache that the model makes by itself.
    """
    row_group = getattr(attention, "layer_type", getattr(attention, "is_sliding", None))
    binding = Binding(layer, layout, row_group, storage)
    if layout is not None:
        hook(attention, binding)
    attention._wsvd = binding


def hook(attention: nn.Module, binding: Binding) -> None:
    """Open a call around every forward of an attention layer."""
    binding.handles = [
        attention.register_forward_pre_hook(open_call, with_kwargs=True),
        attention.register_forward_hook(close_call, always_call=True),
    ]


def unbind(attention: nn.Module) -> None:
    """Undo `bind`."""
    unhook(attention._wsvd)
    del attention._wsvd


def unhook(binding: Binding) -> None:
    """Undo `hook`."""
    for handle in binding.handles:
        handle.remove()
    binding.handles = []


def is_hooked(attention: nn.Module) -> bool:
    """Whether a call is opened around forwards of an attention layer."""
    return hasattr(attention, "_wsvd") and bool(attention._wsvd.handles)


def needs_keys(attention: nn.Module) -> bool:
    """Whether a trial has shown that an attention layer cannot read packed keys and values by itself."""
    return hasattr(attention, "_wsvd") and attention._wsvd.needs_keys


def bound_layers(model: PreTrainedModel) -> set[int]:
    """Numbers of the decoder layers whose cache holds latents."""
    bindings = (getattr(a.module, "_wsvd", None) for a in decoder_attentions(model))
    return {b.layer for b in bindings if b is not None and b.layout is not None}


def bind_packed(model: PreTrainedModel) -> None:
    """Let kernels read packed keys and values of layers that hold no latents, where a trial shows that they can.

    Nothing happens where no kernel can run, where attention is not "wsvd", and to layers that are hooked already.
    """
    if not kernels_can_run() or decoder_of(model).config._attn_implementation not in WSVD_FUNCTIONS:
        return
    found = [a for a in decoder_attentions(model) if not (is_hooked(a.module) or needs_keys(a.module))]
    for attention in found:
        if not hasattr(attention.module, "_wsvd"):
            bind(attention.module, attention.layer, None)
        hook(attention.module, attention.module._wsvd)
        attention.module._wsvd.on_trial = True
    wrong = layers_that_need_keys(model, found, latent=False) if found else ()
    for attention in found:
        binding = attention.module._wsvd
        binding.on_trial = False
        if attention.layer in wrong:
            unhook(binding)
            binding.needs_keys = True  # every cache of the model asks, and one trial will do


def open_call(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-hook of `self_attn`: open the channel to the cache layer of this call."""
    binding = attention._wsvd
    if binding.layout is None:
        layer = stored_layer(cache_of(kwargs), binding.layer)
        set_active_call(None if layer is None else DenseCall(attention, layer, binding.on_trial))
        return
    cos = sin = row_key = None
    if binding.layout.rotation != "none":
        cos, sin = (half_rows(rows, binding.layout.rotation) for rows in kwargs["position_embeddings"])
        row_key = (str(cos.device), binding.row_group)
    layer = latent_layer(cache_of(kwargs), binding.layer, row_key, binding.storage)
    set_active_call(None if layer is None else LatentCall(attention, binding.layout, layer, cos, sin))


def stored_layer(cache: object, layer_idx: int) -> StoredMixin | None:
    """The cache layer of a decoder layer, where it is one of ours that holds keys and values."""
    layers = cache.layers if isinstance(cache, Cache) else ()
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    return layer if isinstance(layer, StoredMixin) and not isinstance(layer, LatentMixin) else None


def close_call(attention: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of `self_attn`, called after an exception too."""
    call = active_call()
    set_active_call(None)
    if isinstance(call, LatentCall | DenseCall):
        call.layer.settle()


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
    """Attention function "wsvd": latents and packed tokens where the current call says so, else `base`.

    Args:
        base: "sdpa" or "eager", for ordinary keys and values.
        query, key, value: `[B, Hq or Hkv, N or S, D]` as every attention function of transformers gets them.

    Returns:
        `[B, N, Hq, D]` and the attention weights where `base` gives them.
    """
    call = active_call()
    if isinstance(call, LatentCall | DenseCall) and call.attention is module:
        out, (key, value) = attend_cached(call, query, key, value, attention_mask, scaling, dropout, **kwargs)
        if out is not None:
            return out, None
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[-2]:  # first tokens of a static cache
        attention_mask = attention_mask[..., : key.shape[-2]]
    return base_attention(base, module)(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


def attend_cached(
    call: LatentCall | DenseCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Attention of an open call from what its cache layer holds: `[B, N, Hq, D]`.

    None where ordinary attention has to serve it, and the keys and values for that.
    """
    if call.layer_was_empty:
        prepare(call, query)
        if not call.in_portions:
            return None, (key, value)
    if not call.reads_layer():
        return None, (key, value)
    if key is not call.handed[0] or value is not call.handed[1]:
        kind = "latents" if isinstance(call, LatentCall) else "packed tokens"
        raise RuntimeError(f"{type(call.attention).__name__} changes cached keys or values: it cannot work on {kind}")
    if dropout or kwargs.get("output_attentions") or any(kwargs.get(name) is not None for name in DENSE_ONLY):
        return None, call.expand()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if call.in_portions:
        return attend_in_portions(call, query, mask, scaling, softcap), (key, value)
    out = fused(call, query, mask, scaling, softcap)
    if out is None and isinstance(call, DenseCall):
        return None, call.expand()
    if out is None:
        out = latent_attention(query, *call.cached(), mask, scaling=scaling, softcap=softcap, **call.key_norms())
    return out, (key, value)


def fused(
    call: LatentCall | DenseCall, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor | None:
    """Attention of an open call by a kernel, `[B, N, Hq, D]`; None where it has to go another way."""
    if device_obstacle(query.device) is not None:
        return None
    norm = key_norm_weights(call, call.attention._wsvd)
    parts = norm if isinstance(norm, str) else decode_parts(call, query)
    rotation = call.rotation()
    if needs_torch(query, parts, rotation, norm):
        return None
    if mask is not None:
        mask = mask[..., -query.shape[2] :, :]
    lengths = call.layer.lengths()
    if lengths is None and mask is None and rotation is None and any(part.places is not None for part in parts):
        # By place alone, nothing says where the sequence ends.
        tokens = call.layer.visible_tokens(query.shape[2])
        lengths = torch.full((query.shape[0],), tokens, dtype=torch.int32, device=query.device)
    return fused_attention(query, parts, rotation, mask, scaling=scaling, softcap=softcap, lengths=lengths, norm=norm)


def prepare(call: LatentCall | DenseCall, query: Tensor) -> None:
    """Work out what later steps of the same cache need; not in a traced step, whose tensors would be the graph's."""
    unread = isinstance(call, DenseCall) and call.layer.storage.whole
    if device_obstacle(query.device) is None and not unread and not torch.compiler.is_compiling():
        key_norm_weights(call, call.attention._wsvd)
        decode_parts(call, query)
        if call.layer.is_compileable:
            hold_addresses(call)


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
