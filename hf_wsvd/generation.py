"""`generate` of a compressed model: steps that are compiled and launch-free where they can be, with no argument."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .cache_choice import call_of, choose_cache
from .cache_keeper import CacheKeeper
from .compat import CACHE_ARGUMENT
from .static_room import check_length


logger = logging.get_logger("hf_wsvd")

KEEPER = "_wsvd_cache_keeper"


class GenerateMixin:
    """`generate` of transformers, given a cache of fixed size of ours where `choose_cache` says so.

    transformers compiles the steps of such a cache by itself (`Cache.is_compileable`).
    """

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, *args, **kwargs)
        check_length(self, call)
        choice = choose_cache(call)
        if choice.cache == "dynamic":
            return super().generate(*args, **kwargs)
        with keeper_of(self).lent(self, choice) as cache:
            if cache is None:
                logger.info("hf_wsvd: another generation of this model runs: this one takes a dynamic cache")
                return super().generate(*args, **kwargs)
            return super().generate(*args, **{**kwargs, CACHE_ARGUMENT: cache})


def keeper_of(model: PreTrainedModel) -> CacheKeeper:
    """What keeps the cache of a model; made when it is first asked for."""
    return vars(model).setdefault(KEEPER, CacheKeeper())


def free_generate_cache(model: PreTrainedModel) -> None:
    """Free the cache of fixed size that `generate` keeps with a compressed model for its next call.

    Nothing happens where there is none. A generation that runs meanwhile has it back with the model when it ends.

    Raises:
        ValueError: no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"free_generate_cache: model={type(model).__name__} is not allowed; allowed: a transformers model"
        )
    if KEEPER in vars(model):
        keeper_of(model).free()
