"""Forms of the Hopper kernels for compiling ahead of time."""

from __future__ import annotations
