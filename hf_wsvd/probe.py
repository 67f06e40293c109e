"""The experiment that tells how a model turns projected keys into cached ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from .call import set_active_call
from .compat import CACHE_ARGUMENT
from .decoder import DecoderAttention, decoder_of, evaluation_mode
from .kernels import LatentHeads
from .quantizer_config import KeyLayout
from .rope import find_key_layout, relative_error


logger = logging.get_logger("hf_wsvd")

PROBE_TOKENS = 8
VALUE_TOLERANCE = 2e-2


class Probe:
    """Stands in for a `LatentCall` and keeps what the projections of one layer computed."""

    def __init__(self, attention: nn.Module):
        self.attention = attention
        self.key: LatentHeads | None = None
        self.value: LatentHeads | None = None
        self.rows: tuple[Tensor, Tensor] | None = None

    def record(self, projection: nn.Module, heads: LatentHeads) -> None:
        if projection is self.attention.k_proj:
            self.key = heads
        elif projection is self.attention.v_proj:
            self.value = heads


class RecordingCache(DynamicCache):
    """Keeps the keys and values that each layer hands to its cache."""

    def __init__(self, config: PretrainedConfig):
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.seen[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def probe_tokens(model: PreTrainedModel, count: int = PROBE_TOKENS) -> Tensor:
    """Different token ids (where the vocabulary holds that many), `[1, count]`, where the decoder's embedding is."""
    embedding = decoder_of(model).get_input_embeddings()
    return torch.arange(1, count + 1, device=embedding.weight.device)[None] % embedding.num_embeddings


@torch.no_grad()
def probe_key_layouts(model: PreTrainedModel, attentions: list[DecoderAttention]) -> dict[int, KeyLayout | None]:
    """Run a few tokens through the decoder and find each compressed layer's key layout.

    Returns:
        Layer number to layout; None for a layer whose keys or values are not what its projections explain. Such a
        layer keeps the dense cache; a warning names it.
    """
    probes = {a.layer: Probe(a.module) for a in attentions}
    handles = []
    for attention in attentions:
        probe = probes[attention.layer]
        handles.append(attention.module.register_forward_pre_hook(partial(_open, probe), with_kwargs=True))
        handles.append(attention.module.register_forward_hook(_close, always_call=True))
    cache = RecordingCache(model.config.get_text_config(decoder=True))
    try:
        with evaluation_mode(model):
            decoder_of(model)(input_ids=probe_tokens(model), use_cache=True, **{CACHE_ARGUMENT: cache})
    finally:
        for handle in handles:
            handle.remove()
    layouts = {layer: _layout(probe, cache.seen.get(layer)) for layer, probe in probes.items()}
    unknown = [layer for layer, layout in layouts.items() if layout is None]
    if unknown:
        logger.warning(
            f"hf_wsvd: no known norm and rotation explains the cached keys of decoder layers {unknown} "
            f"({type(attentions[0].module).__name__}): their weights are low-rank, their cache stays dense"
        )
    return layouts


def _layout(probe: Probe, seen: tuple[Tensor, Tensor] | None) -> KeyLayout | None:
    if seen is None or probe.key is None or probe.value is None:
        return None
    if relative_error(probe.value.expand(), seen[1]) > VALUE_TOLERANCE:
        return None
    return find_key_layout(probe.attention, probe.key, probe.rows, seen[0])


def _open(probe: Probe, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    probe.rows = kwargs.get("position_embeddings")
    set_active_call(probe)


def _close(attention: nn.Module, args: tuple, output: Any) -> None:
    set_active_call(None)
