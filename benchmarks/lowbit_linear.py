"""Time of one linear layer of low precision beside the plain one, on a CPU or a GPU.

    OMP_NUM_THREADS=1 python benchmarks/lowbit_linear.py --output docs/results/lowbit_linear_cpu.json
    python benchmarks/lowbit_linear.py --device cuda --compile --output docs/results/lowbit_linear_h200.json

Layers of one shape take turns, so that a slow minute of the machine hits all; the median of the rounds, and the
fastest. `int_mm` is torch's integer product of int8 operands alone, without rounding and scales.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_wsvd import LowPrecisionConfig
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.tables import text_table
from hf_wsvd.files import write_text
from hf_wsvd.low_precision.linear import QuantizedLinear
from hf_wsvd.low_precision.product import integer_product
from record import command_line


SHAPES = ((4096, 4096), (4096, 11008))  # inputs, outputs: of a 7B model
ROWS = (1, 16, 512)
FORMS = {"W8A8": (8, 8), "W8A16": (8, 16), "W4A8": (4, 8), "W4A16": (4, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for inputs, outputs in SHAPES:
        layers = layers_of(inputs, outputs, device, arguments.compile)
        for count in arguments.rows:
            rows += measured(layers, inputs, count, device, arguments.rounds)
    header = ["outputs", "rows", "layer", "ms", "fastest"]
    print(text_table(header, [list(map(str, row.values())) for row in rows]))
    results = {
        "command": command_line("lowbit_linear.py"),
        "environment": environment(device),
        "rounds": arguments.rounds,
        "compiled": arguments.compile,
        "rows": rows,
    }
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def layers_of(inputs: int, outputs: int, device: torch.device, compiled: bool) -> dict[str, Callable]:
    """By name functions of bf16 activations `[rows, inputs]`."""
    linear = nn.Linear(inputs, outputs, bias=False, device=device).requires_grad_(False)
    modules: dict[str, nn.Module] = {"bf16": nn.Linear(inputs, outputs, bias=False, device=device).bfloat16()}
    if device.type == "cpu":
        modules["fp32"] = linear
    for name, (weight_bits, activation_bits) in FORMS.items():
        config = LowPrecisionConfig(weight_bits, activation_bits, method="rtn")
        modules[name] = QuantizedLinear.from_linear(linear, config)
    functions = {name: torch.compile(m, fullgraph=True) if compiled else m for name, m in modules.items()}
    codes = modules["W8A8"].codes

    def int_mm(x: torch.Tensor) -> torch.Tensor:
        return integer_product(x, codes)

    return {**functions, "int_mm": int_mm}


@torch.no_grad()
def measured(
    layers: dict[str, Callable], inputs: int, rows: int, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Milliseconds of every layer for `rows` tokens."""
    x = torch.randn(rows, inputs, device=device)
    given = {"fp32": x, "int_mm": (x * 30).clamp(-127, 127).to(torch.int8)}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(rounds + 1):
        for name, layer in layers.items():
            of = given.get(name, x.bfloat16())
            synchronize(device)
            start = time.perf_counter()
            y = layer(of)
            synchronize(device)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    outputs = y.shape[-1]
    return [
        {
            "outputs": outputs,
            "rows": rows,
            "layer": name,
            "median_ms": round(statistics.median(values), 3),
            "fastest_ms": round(min(values), 3),
        }
        for name, values in times.items()
    ]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
