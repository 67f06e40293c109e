"""The experiment that tells whether a model's attention can work on latents: a few steps, cached and uncached."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from .cache_layers import StoredMixin
from .compat import CACHE_ARGUMENT
from .decoder import DecoderAttention, decoder_of, evaluation_mode
from .kernels import use
from .latent_layers import LatentMixin
from .probe import PROBE_TOKENS, probe_tokens
from .quantizer_config import WHOLE_LAYER
from .rope import relative_error
from .upgrade import create_layers, upgraded


logger = logging.get_logger("hf_wsvd")

# Far above what rounding does to one layer (in half precision and with peaked attention too), far below what attention
# over the wrong tokens gives.
FULL_PRECISION_TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-2, 0.2
# A prompt, several tokens on top of it, one more.
PARTS = (slice(0, 4), slice(4, PROBE_TOKENS - 1), slice(PROBE_TOKENS - 1, PROBE_TOKENS))


class Trial:
    """Outputs of every layer's attention without a cache, and the layers that differ from them with one."""

    def __init__(self):
        self.whole: dict[int, Tensor] = {}
        self.part: slice | None = None
        self.wrong: set[int] = set()

    def compare(self, layer: int, attention: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook. The uncached output takes the place of the cached one, so that errors do not add up."""
        given = output[0] if isinstance(output, tuple) else output
        if self.part is None:
            self.whole[layer] = given
            return output
        wanted = self.whole[layer][:, self.part]
        half = given.dtype in (torch.bfloat16, torch.float16)
        if relative_error(given, wanted) > (HALF_PRECISION_TOLERANCE if half else FULL_PRECISION_TOLERANCE):
            self.wrong.add(layer)
        return (wanted, *output[1:]) if isinstance(output, tuple) else wanted


@torch.no_grad()
def layers_that_need_keys(
    model: PreTrainedModel, attentions: list[DecoderAttention], *, latent: bool = True
) -> set[int]:
    """Bound layers whose attention goes wrong on latents; a warning names them.

    Some families use what the cache returned beside the attention function (DiffLlama, Doge). If the model fails on
    the latent path altogether, no layer can work on it.

    Args:
        latent: False for layers that hold keys and values, which attention reads from the cache layer by itself: those
            that go wrong read unpacked ones, and there is nothing to warn of.
    """
    trial, tokens = Trial(), probe_tokens(model)
    handles = [a.module.register_forward_hook(partial(trial.compare, a.layer)) for a in attentions]
    decoder = decoder_of(model)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not latent:
        create_layers(cache, max(a.layer for a in attentions) + 1)
        cache.layers = [upgraded(layer, False, WHOLE_LAYER) or layer for layer in cache.layers]
    kind, reason = LatentMixin if latent else StoredMixin, ""
    try:
        with evaluation_mode(model), use("torch"):  # what is tried is the model, not the device's kernels
            decoder(input_ids=tokens, use_cache=False)
            for trial.part in PARTS:
                decoder(input_ids=tokens[:, trial.part], use_cache=True, **{CACHE_ARGUMENT: cache})
        # A layer of another kind (hybrids keep two things in one) was not exchanged for one of ours.
        trial.wrong.update(a.layer for a in attentions if not isinstance(cache.layers[a.layer], kind))
    except Exception as error:  # whatever a foreign forward trips over
        reason = f" ({error})"
        trial.wrong.update(a.layer for a in attentions)
    finally:
        for handle in handles:
            handle.remove()
    if trial.wrong and latent:
        logger.warning(
            f"hf_wsvd: the attention of decoder layers {sorted(trial.wrong)} ({type(attentions[0].module).__name__}) "
            f"cannot work on latents{reason}: their weights are low-rank, their cache stays dense"
        )
    return trial.wrong
