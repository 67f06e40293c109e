"""Sight of a decoder's attention: what every layer's attention function gets and gives, without attention maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from ..attention import base_attention
from ..decoder import decoder_attentions, decoder_of


# The attention function that goes on computing, and the masks that it wants.
BASES = {"sdpa": sdpa_mask, "eager": eager_mask, "wsvd": sdpa_mask, "wsvd_eager": eager_mask}


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer's attention function.

    Attributes:
        layer: decoder layer number.
        query: `[B, Hq, N, D]`, after rotation.
        key, value: `[B, Hkv, S, D]`, as a cache of dense heads keeps them.
        mask: as the model made it: None (causal), bool (true where attended), or added to the scores.
        scaling: of the scores; None for `D ** -0.5`.
        output: `[B, N, Hq, D]`, part of the graph where there is one.
        attend: the same attention over other values.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    output: Tensor
    attend: Callable[[Tensor], Tensor]


Observer = Callable[[AttentionCall], None]


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Show `observer` every call of the decoder's attention layers with keys of their own.

    The model computes what it computed before, with "sdpa" or "eager" where it used a function that hides its masks.
    Outside, after an error too, the decoder has the attention function it had.

    Raises:
        ValueError: the decoder's attention does not go through transformers' attention interface.
    """
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    softcap = getattr(decoder.config, "attn_logit_softcapping", None) is not None  # which sdpa does not know
    base = before if before in BASES else "eager" if softcap else "sdpa"
    modules = [(attention.layer, attention.module) for attention in decoder_attentions(model)]
    try:
        decoder.set_attn_implementation(observing(base))
        if decoder.config._attn_implementation != observing(base):
            raise ValueError(f"{type(decoder).__name__} does not let its attention function be set: no head is seen")
        for layer, module in modules:
            module._attention_observer = (layer, observer)
        yield
    finally:
        for _, module in modules:
            vars(module).pop("_attention_observer", None)
        decoder.set_attn_implementation(before)


def observing(base: str) -> str:
    """Name of the attention function that shows what `base` does."""
    return f"observed_{base}"


def attend_observed(
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
    """Attention function "observed_..."; arguments and results are those of every one of transformers.

    What observes hangs on the module, not on the thread: recomputed layers run in autograd's own threads.
    """
    function = partial(base_attention(base, module), module, query, key)
    result = function(value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    held = vars(module).get("_attention_observer")
    if held is not None:

        def attend(other: Tensor) -> Tensor:
            with torch.no_grad():
                return function(other, attention_mask, scaling=scaling, dropout=dropout, **kwargs)[0]

        layer, observer = held
        observer(AttentionCall(layer, query, key, value, attention_mask, scaling, result[0], attend))
    return result


for _base, _mask in BASES.items():
    AttentionInterface.register(observing(_base), partial(attend_observed, _base))
    AttentionMaskInterface.register(observing(_base), _mask)
