"""Which auto class of transformers a config's architecture is loaded with."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def auto_class_of(config: PretrainedConfig) -> Any:
    """The auto class that loads a config's architecture: image and text, or text alone.

    Raises ValueError naming the architecture if neither does.
    """
    candidates = (
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    )
    architectures = set(config.architectures or ())
    for auto_class, names in candidates:
        if architectures & set(names.values()):
            return auto_class
    # A GGUF file, and a config made in code, name no architecture; the model type decides.
    for auto_class, names in reversed(candidates) if not architectures else ():
        if config.model_type in names:
            return auto_class
    name = ", ".join(sorted(architectures)) or config.model_type
    raise ValueError(f"{name} is neither a causal language model nor an image-text-to-text model of transformers")
