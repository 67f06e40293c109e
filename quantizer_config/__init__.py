"""Configuration of WSVD: pure data, validated, JSON round trip."""

from .cache_config import ALL_BITS, SCHEME_BITS, CacheConfig, StorageSpec
from .config import FORMAT_VERSION, METHODS, WSVDConfig
from .layout import KeyLayout
from .ranks import allocated_by_gradient, rank_for_parameters, rank_for_ratio, resolve_ranks


__all__ = [
    "ALL_BITS",
    "FORMAT_VERSION",
    "METHODS",
    "SCHEME_BITS",
    "CacheConfig",
    "KeyLayout",
    "StorageSpec",
    "WSVDConfig",
    "allocated_by_gradient",
    "rank_for_parameters",
    "rank_for_ratio",
    "resolve_ranks",
]
