"""The mode in which tokens are packed and unpacked: always the same, whatever the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch


AUTOCAST_DEVICES = ("cpu", "cuda")


def unaffected(method: Callable) -> Callable:
    """Run a method without gradients and without autocast, which would round its arithmetic to 16 bits."""

    @wraps(method)
    def run(*args, **kwargs):
        with torch.no_grad():
            active = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
            if not active:
                return method(*args, **kwargs)
            with torch.autocast(active[0], enabled=False), torch.autocast(active[-1], enabled=False):
                return method(*args, **kwargs)

    return run
