"""The `hf-wsvd` command. One command a file."""

from .app import main


__all__ = ["main"]
