"""What a measurement ran on, for the record beside its numbers."""

import os
import platform
from pathlib import Path

import torch
import transformers

from ..version import __version__


def environment(device: torch.device | str = "cpu") -> dict[str, str | int | float]:
    """Versions, device, CPU threads, and the load average: well above the threads, other work slowed this down."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {
        "hf_wsvd": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else -1.0,
    }


def processor_name() -> str:
    """The CPU's marketing name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
