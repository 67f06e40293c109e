"""Configuration of WSVD: pure data, validated, JSON round trip."""

from .config import FORMAT_VERSION, WSVDConfig
from .layout import KeyLayout
from .ranks import allocated_by_gradient, rank_for_parameters, rank_for_ratio, resolve_ranks


__all__ = [
    "FORMAT_VERSION",
    "KeyLayout",
    "WSVDConfig",
    "allocated_by_gradient",
    "rank_for_parameters",
    "rank_for_ratio",
    "resolve_ranks",
]
