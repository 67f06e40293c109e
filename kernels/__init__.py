"""Attention over latents: plain-torch oracles and the paths built on them."""

from .latent_attention import latent_attention, latent_attention_oracle
from .latent_heads import LatentHeads, Rotation, cached_key


__all__ = ["LatentHeads", "Rotation", "cached_key", "latent_attention", "latent_attention_oracle"]
