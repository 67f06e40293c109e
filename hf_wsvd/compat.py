"""The only file that knows transformers versions."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version


_VERSION = Version(Version(transformers.__version__).base_version)

# The name of the cache argument of every forward and of `generate`: renamed in 5.24.
CACHE_ARGUMENT = "cache" if Version("5.24") <= _VERSION else "past_key_values"


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of an attention layer's forward."""
    return kwargs.get(CACHE_ARGUMENT)


def cache_of_output(output: Any) -> Any:
    """The cache that a model returned."""
    return getattr(output, CACHE_ARGUMENT)
