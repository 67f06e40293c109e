"""Low-rank latent KV caches for Hugging Face models (WSVD, arXiv 2604.02570).

Importing this package registers the quantization method "wsvd" and the attention functions "wsvd" and "wsvd_eager"
with transformers.
"""

from .attention import register_attention
from .cache import WSVDCache, cache_nbytes
from .cache_choice import CacheChoice, explain_generate
from .calibration import (
    collect_statistics,
    default_calibration,
    load_calibration,
    load_statistics,
    save_statistics,
)
from .decode_choice import register_explanation
from .estimate import MemoryEstimate, estimate_memory
from .generation import free_generate_cache
from .headguard import select_heads
from .hub import model_card, push_to_hub
from .image_tokens import image_tokens
from .memory_report import MemoryReport, memory_report
from .prefill import set_prefill_chunk
from .quantizer import WSVDHfQuantizer, compress
from .quantizer_config import CacheConfig, GuardMap, HeadGuardConfig, LowPrecisionConfig, WSVDConfig
from .register import register_quantization
from .verification import renew_self_check, verify
from .version import __version__


register_attention()
register_explanation()
register_quantization(WSVDConfig, WSVDHfQuantizer)

__all__ = [
    "CacheChoice",
    "CacheConfig",
    "GuardMap",
    "HeadGuardConfig",
    "LowPrecisionConfig",
    "MemoryEstimate",
    "MemoryReport",
    "WSVDCache",
    "WSVDConfig",
    "WSVDHfQuantizer",
    "__version__",
    "cache_nbytes",
    "collect_statistics",
    "compress",
    "default_calibration",
    "estimate_memory",
    "explain_generate",
    "free_generate_cache",
    "image_tokens",
    "load_calibration",
    "load_statistics",
    "memory_report",
    "model_card",
    "push_to_hub",
    "renew_self_check",
    "save_statistics",
    "select_heads",
    "set_prefill_chunk",
    "verify",
]
