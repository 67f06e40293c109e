"""The only file that knows transformers versions."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel


_VERSION = Version(Version(transformers.__version__).base_version)

# The name of the cache argument of every forward and of `generate`: renamed in 5.24.
CACHE_ARGUMENT = "cache" if Version("5.24") <= _VERSION else "past_key_values"


# The same, and the name that callers of older code may still give.
CACHE_ARGUMENTS = tuple(dict.fromkeys((CACHE_ARGUMENT, "past_key_values")))

# Attributes in which a model keeps its compiled step, made of the model itself.
COMPILED_STEP = ("_compiled_call", "_last_compile_config")

# Before torch 2.13, the thread that imported CUDA graphs is the only one that can record and replay them.
CUDA_GRAPHS_IN_ANY_THREAD = Version("2.13") <= Version(Version(torch.__version__).base_version)


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of an attention layer's forward."""
    return kwargs.get(CACHE_ARGUMENT)


def cache_of_output(output: Any) -> Any:
    """The cache that a model returned."""
    return getattr(output, CACHE_ARGUMENT)


def restore_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast the parameters of a loaded quantized checkpoint to `dtypes`, those they had before loading.

    transformers before 5.21 leaves parameters that it renames (a vision-language model's whole decoder) in the
    checkpoint's dtype, whatever dtype was asked for, and then fails on mixed dtypes.
    """
    if Version("5.21") <= _VERSION:
        return
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
