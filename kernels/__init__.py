"""Attention over latents and packed caches: plain-torch oracles and paths, kernels, and the choice between them."""

from .dispatch import Choice, choose, explain, use
from .fused_attention import fused_attention
from .latent_attention import latent_attention, latent_attention_oracle
from .latent_heads import LatentHeads, Rotation, cached_key
from .stored_tokens import DecodePart, KeyNormWeights, StoredTokens


__all__ = [
    "Choice",
    "DecodePart",
    "KeyNormWeights",
    "LatentHeads",
    "Rotation",
    "StoredTokens",
    "cached_key",
    "choose",
    "explain",
    "fused_attention",
    "latent_attention",
    "latent_attention_oracle",
    "use",
]
