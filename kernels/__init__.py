"""Attention over latents: plain-torch oracles and the paths built on them."""
