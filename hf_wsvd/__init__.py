"""Low-rank latent KV caches for Hugging Face models."""

from .version import __version__


__all__ = ["__version__"]
