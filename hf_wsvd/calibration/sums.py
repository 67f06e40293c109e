"""Running sums that lie where they were measured if there is room, else on the CPU."""

from __future__ import annotations

import os
from collections.abc import Hashable

import torch
from torch import Tensor


FREE_SHARE = 0.4  # of a device's free memory that sums may take


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; 0 where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0


class Sums:
    """fp64 sums by key.

    Args:
        needed: bytes that all sums will take. Where a device has not enough free memory, its sums go to the CPU.
    """

    def __init__(self, needed: int):
        self.needed = needed
        self.values: dict[Hashable, Tensor] = {}
        self._resumed: set[Hashable] = set()  # sums of an earlier run, on the CPU until the first addition
        self._homes: dict[torch.device, torch.device] = {}

    def resume(self, values: dict[Hashable, Tensor]) -> None:
        """Go on from the sums of an earlier run."""
        self.values = values
        self._resumed = set(values)

    def add(self, key: Hashable, value: Tensor) -> None:
        """Add `value` to the sum `key`."""
        if key in self._resumed:
            self.values[key] = self.values[key].to(self._home(value.device))
            self._resumed.remove(key)
        present = self.values.get(key)
        if present is None:
            self.values[key] = value.to(self._home(value.device), torch.float64, copy=True)
        else:
            present += value.to(present.device)

    def take_mean(self, key: Hashable, count: int) -> Tensor:
        """The sum over `count`, on the CPU; the sum is given up, so that both never lie in memory together."""
        return self.values.pop(key).cpu().div_(count)

    def _home(self, device: torch.device) -> torch.device:
        if device not in self._homes:
            home = device
            if device.type == "cuda" and self.needed > FREE_SHARE * free_bytes(device):
                home = torch.device("cpu")
            self._homes[device] = home
        return self._homes[device]
