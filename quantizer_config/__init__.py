"""Configuration of WSVD: pure data, validated, JSON round trip."""

from .cache_config import CacheConfig
from .config import FORMAT_VERSION, METHODS, WSVDConfig
from .guard_map import GUARD_BITS, Guard, GuardMap
from .head_guard_config import SELECTORS, HeadGuardConfig
from .layout import KeyLayout
from .low_precision_config import ACTIVATION_BITS, LOW_PRECISION_METHODS, WEIGHT_BITS, LowPrecisionConfig
from .ranks import allocated_by_gradient, rank_for_parameters, rank_for_ratio, resolve_ranks
from .storage_spec import ALL_BITS, KIVI_GROUP_SIZE, SCHEME_BITS, WHOLE_LAYER, LayerStorage, StorageSpec


__all__ = [
    "ACTIVATION_BITS",
    "ALL_BITS",
    "FORMAT_VERSION",
    "GUARD_BITS",
    "KIVI_GROUP_SIZE",
    "LOW_PRECISION_METHODS",
    "METHODS",
    "SCHEME_BITS",
    "SELECTORS",
    "WEIGHT_BITS",
    "WHOLE_LAYER",
    "CacheConfig",
    "Guard",
    "GuardMap",
    "HeadGuardConfig",
    "KeyLayout",
    "LayerStorage",
    "LowPrecisionConfig",
    "StorageSpec",
    "WSVDConfig",
    "allocated_by_gradient",
    "rank_for_parameters",
    "rank_for_ratio",
    "resolve_ranks",
]
