"""From weights and statistics to low-rank factors."""

from .factorise import factorise


__all__ = ["factorise"]
