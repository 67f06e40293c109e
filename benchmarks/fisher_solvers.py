"""Solvers of the Fisher-weighted refinement on one synthetic projection: loss against time.

    python benchmarks/fisher_solvers.py --output docs/results/fisher_solvers.json

All start at the same whitened factors; "equal split" passes them to Adam as the paper has them, with the singular
values shared by both factors. Beside the loss stand two errors that the solvers do not see, as shares too: with all
entries of the weight alike, and of the projection's output for inputs like those that the start was made for.

Half of the variance of the Fisher information's logarithm lies in whole rows and columns, as it is a mean of squared
products of an input and an output gradient; the rest is independent for every entry.
"""

import argparse
import functools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.fit import factorise, spectrum
from hf_wsvd.fit.fisher import Refined, fisher_loss, refine_adam, refine_alternating
from tables import fisher_solvers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--in-features", type=int, default=576)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32, help="below the head dimension")
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of the Fisher's logarithm")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each solver, in turns")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    weight, fisher, gram = (tensor.to(arguments.device) for tensor in synthetic_projection(arguments))
    per_head = weight.double().unflatten(0, (arguments.heads, -1))
    down, up = factorise(weight, arguments.rank, spectrum(per_head @ gram.double() @ per_head.mT))
    split = equally_split(down, up)
    solvers: dict[str, Callable[[], Refined]] = {"whitened start": lambda: Refined(down, up, [])}
    for steps in (100, 1000):
        solvers[f"Adam, {steps:,} steps"] = functools.partial(refine_adam, weight, fisher, down, up, steps=steps)
        solvers[f"Adam, {steps:,} steps, equal split"] = functools.partial(
            refine_adam, weight, fisher, *split, steps=steps
        )
    for iterations in (1, 3, 10):
        solvers[f"alternating, {iterations} iteration{'s' * (iterations > 1)}"] = functools.partial(
            refine_alternating, weight, fisher, down, up, iterations=iterations, tolerance=0
        )
    seconds: dict[str, list[float]] = {label: [] for label in solvers}
    found: dict[str, Refined] = {}
    refine_alternating(weight, fisher, down, up, iterations=1)  # libraries are loaded at their first use
    for _ in range(arguments.repeats):
        for label, solve in solvers.items():
            started = time.perf_counter()
            found[label] = solve()
            if weight.is_cuda:
                torch.cuda.synchronize(weight.device)
            seconds[label].append(time.perf_counter() - started)

    uniform = torch.ones_like(fisher)
    results = {
        "command": shlex.join(["python", "benchmarks/fisher_solvers.py", *sys.argv[1:]]),
        "environment": environment(arguments.device),
        **{name: value for name, value in vars(arguments).items() if name not in ("output", "device")},
        "rows": [
            {
                "label": label,
                "loss": fisher_loss(weight, fisher, found[label].down, found[label].up),
                "unweighted_error": fisher_loss(weight, uniform, found[label].down, found[label].up),
                "output_error": output_error(weight, gram, found[label]),
                "seconds": statistics.median(times),
                "fastest_seconds": min(times),
                "slowest_seconds": max(times),
            }
            for label, times in seconds.items()
        ],
    }
    write_text(arguments.output, json.dumps(results, indent=1) + "\n")
    print(fisher_solvers(results))


def synthetic_projection(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and Fisher information `[heads * head_dim, in_features]`, and the inputs' second moment."""
    random = torch.Generator().manual_seed(arguments.seed)
    draw = functools.partial(torch.randn, generator=random)
    outputs, inputs = arguments.heads * arguments.head_dim, arguments.in_features
    # Weights and activations with a falling spectrum, each in directions of its own.
    directions = torch.linalg.qr(draw(inputs, inputs))[0]
    weight = (draw(outputs, inputs) * torch.logspace(0, -1, inputs)) @ directions / inputs**0.5
    directions = torch.linalg.qr(draw(inputs, inputs))[0]
    gram = (directions * torch.logspace(0, -3, inputs)) @ directions.T
    logarithm = draw(outputs, 1) / 2 + draw(1, inputs) / 2 + draw(outputs, inputs) / 2**0.5
    return weight, torch.exp(arguments.spread * logarithm), gram


def output_error(weight: Tensor, gram: Tensor, factors: Refined) -> float:
    """`E |W x - W' x|^2 / E |W x|^2`."""
    error = (factors.up.double() @ factors.down.double()).flatten(0, 1) - weight
    energies = [
        torch.einsum("oi,ij,oj->", matrix, gram.double(), matrix).item() for matrix in (error, weight.double())
    ]
    return energies[0] / energies[1]


def equally_split(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, each with the square roots of its singular values."""
    left, singular, right = torch.linalg.svd(down, full_matrices=False)
    root = singular.sqrt()
    return root[:, :, None] * right, up @ left * root[:, None, :]


if __name__ == "__main__":
    main()
