"""The class of a compressed model: transformers' own, with our `push_to_hub`, `save_pretrained` and `generate`.

Transformers offers no hook for either. The model's class becomes a subclass of the same name, as
`torch.nn.utils.parametrize` does it: methods put into the instance would refer back to it and hold its memory until a
garbage collection.
"""

from __future__ import annotations

import functools

from transformers import GenerationMixin, PreTrainedModel

from .card import TAGS
from .compat import COMPILED_STEP
from .generation import KEEPER, GenerateMixin
from .hub import CardMixin


class CompressedMixin(CardMixin):
    """What a model's own class gets."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        # Pickle finds classes by name, and this one's name is its base's. Copies share no cache, and no compiled step:
        # it belongs to the weights of this model.
        state = {name: value for name, value in self.__dict__.items() if name not in (KEEPER, *COMPILED_STEP)}
        return _new, (_without_methods(type(self)),), state


class GeneratingMixin(GenerateMixin, CompressedMixin):
    """The same, for models that generate by the loop of transformers."""


def install_methods(model: PreTrainedModel) -> None:
    """Give a model our methods; nothing where it has them.

    The quantizer calls this once it has bound the model, and `remove_methods` when it dequantizes it.
    """
    model.__class__ = _with_methods(type(model))
    model.add_model_tags(TAGS)  # for cards that others write, such as the Trainer's


def remove_methods(model: PreTrainedModel) -> None:
    """Undo `install_methods`; does nothing where it was never called."""
    if isinstance(model, CompressedMixin):
        model.__class__ = _without_methods(type(model))
        model.model_tags = [tag for tag in model.model_tags or () if tag not in TAGS] or None
        for name in (KEEPER, *COMPILED_STEP):
            vars(model).pop(name, None)


@functools.cache
def _with_methods(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    if issubclass(base, CompressedMixin):
        return base
    generates = getattr(base, "generate", None) is GenerationMixin.generate
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (GeneratingMixin if generates else CompressedMixin, base), names)


def _without_methods(subclass: type[PreTrainedModel]) -> type[PreTrainedModel]:
    _, base = subclass.__bases__
    return base


def _new(base: type[PreTrainedModel]) -> PreTrainedModel:
    subclass = _with_methods(base)
    return subclass.__new__(subclass)
