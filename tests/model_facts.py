"""What tests ask of a model."""

from __future__ import annotations

import tiny_models
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.modules import LatentProjection


VISION = {f.__name__ for f in tiny_models.VISION_FAMILIES}


def auto_class(family: str) -> type:
    return AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM


@torch.no_grad()
def logits(model: PreTrainedModel, family: str, **options) -> torch.Tensor:
    return model(**tiny_models.prompt(family, batch=2), **options).logits


def hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def own_hooks(model: PreTrainedModel) -> int:
    """Hooks of hf_wsvd alone: transformers adds its own when hidden states are first asked for, and leaves them."""
    return sum(
        getattr(getattr(hook, "func", hook), "__module__", "").partition(".")[0] == "hf_wsvd"
        for m in model.modules()
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    )


def projections(model: PreTrainedModel) -> dict[str, int | None]:
    """Name to rank of every decoder projection, None where it is an ordinary linear layer."""
    sides = [(a, side, getattr(a.module, f"{side}_proj")) for a in decoder_attentions(model) for side in "kv"]
    return {f"{a.layer}.{side}": p.rank if isinstance(p, LatentProjection) else None for a, side, p in sides}
