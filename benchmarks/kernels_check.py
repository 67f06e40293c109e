"""Every kind of decode call on a GPU against the definition in fp64.

    python benchmarks/kernels_check.py --output docs/results/kernels_check_h200.json
    compute-sanitizer python benchmarks/kernels_check.py --small

Exits with 1 if an error is larger than rounding explains. Cases are those of tests/kernel_cases.py, in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from kernel_cases import DecodeCase, operands

from hf_wsvd.evaluate.decode_operands import DecodeShape, random_operands
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.tables import text_table
from hf_wsvd.files import write_text
from hf_wsvd.kernels.decode_oracle import fused_attention_oracle
from hf_wsvd.kernels.fused_attention import fused_attention
from hf_wsvd.kernels.tiles import fixed_tile
from kernels_check_cases import GROUPS, SMALL, STEP
from record import command_line


# Relative, of a result in a dtype: keys, weights and results are rounded to it, by a few of its units (2^-11, 2^-8).
# A score's error grows with the query.
ROUNDING = {"float16": 2e-3, "bfloat16": 1.6e-2}


class Outcome(NamedTuple):
    """One case: the kernels that served it, its relative error, and what is wrong with it, or None."""

    group: str
    case: str
    dtype: str
    kernels: list[str]
    error: float
    tolerance: float
    complaint: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--groups", nargs="+", choices=[*GROUPS, *SPECIAL], help="default: all")
    parser.add_argument("--small", action="store_true", help="few small cases, in this process: for compute-sanitizer")
    parser.add_argument("--processes", type=int, default=8, help="kernels compile side by side")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none here")
    if arguments.small:
        outcomes = [checked("small", case) for case in SMALL]
    else:
        groups = arguments.groups or [*GROUPS, *SPECIAL]
        cases = [(name, case) for name in groups for case in GROUPS.get(name, ())]
        outcomes = in_processes(cases, arguments.processes)
        outcomes += [outcome for name in groups if name in SPECIAL for outcome in SPECIAL[name]()]
    report(outcomes)
    if arguments.output:
        results = {
            "command": command_line("kernels_check.py"),
            "environment": environment("cuda"),
            "rows": [outcome._asdict() for outcome in outcomes],
        }
        write_text(arguments.output, json.dumps(results, indent=2) + "\n")
    sys.exit(any(outcome.complaint for outcome in outcomes))


def in_processes(cases: list[tuple[str, DecodeCase]], processes: int) -> list[Outcome]:
    """The outcomes of all cases, computed side by side."""
    if not cases:
        return []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(checked, *zip(*cases)))


def checked(group: str, case: DecodeCase) -> Outcome:
    """Run a case twice and compare with the definition and with itself; whatever is raised is its outcome."""
    try:
        args, keywords = on_device(operands(case))
        with torch.inference_mode(), fixed_tile(None) as asked:
            found = fused_attention(*args, **keywords)
            again = fused_attention(*args, **keywords)
        wanted = fused_attention_oracle(*args, **keywords)
    except Exception as error:
        return Outcome(group, str(case), case.dtype, [], float("inf"), 0.0, f"{type(error).__name__}: {error}")
    complaint = None if torch.equal(found, again) else "not repeatable"
    return judged(group, str(case), case, asked, found, wanted, complaint)


def judged(
    group: str,
    name: str,
    case: DecodeCase,
    kernels: Iterable[str],
    found: Tensor,
    wanted: Tensor,
    complaint: str | None = None,
) -> Outcome:
    """The outcome of one result."""
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    tolerance = ROUNDING[case.dtype] * max(1.0, case.peak / 2)
    if not torch.isfinite(found).all():
        complaint = "not finite"
    elif not error <= tolerance:
        complaint = f"error {error:.2g} above {tolerance:.2g}"
    return Outcome(group, name, case.dtype, list(dict.fromkeys(kernels)), error, tolerance, complaint)


def on_device(value: Any) -> Any:
    """The same arguments with all tensors on the GPU; strides, and what lies between, are kept."""
    if isinstance(value, Tensor):
        storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return storage.cuda().as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_device, value))
    return type(value)(map(on_device, value)) if isinstance(value, (list, tuple)) else value


def graph_replays() -> Iterable[Outcome]:
    """A captured call whose lengths and query change between replays."""
    for dtype, code, bits, apart in (
        ("bfloat16", "float", 0, True),
        ("float16", "symmetric", 4, True),
        ("bfloat16", "symmetric", 8, False),
    ):
        starts = (0, 0) if apart else None
        case = replace(
            STEP, dtype=dtype, tokens=3000, code=code, bits=bits, segments=apart, lengths=(3000, 1), starts=starts
        )
        args, keywords = on_device(operands(case))
        with torch.inference_mode():
            fused_attention(*args, **keywords)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), fixed_tile(None) as asked:
                out = fused_attention(*args, **keywords)
        for lengths, starts in (((3000, 1), (0, 0)), ((17, 2999), (3, 2990)), ((2048, 2049), (2047, 0))):
            keywords["lengths"].copy_(torch.tensor(lengths))
            if apart:
                keywords["starts"].copy_(torch.tensor(starts))
            args[0].normal_()
            graph.replay()
            torch.cuda.synchronize()
            wanted = fused_attention_oracle(*args, **keywords)
            yield judged("CUDA graph", f"{code}, lengths {lengths}, starts {starts}", case, asked, out, wanted)


def compiled() -> Iterable[Outcome]:
    """One graph of `torch.compile`, with what surrounds the call."""
    for code, bits, group in (("float", 0, 1), ("asymmetric", 4, 4)):
        case = replace(STEP, dtype="bfloat16", group=group, code=code, bits=bits, lengths=(1000, 500))
        args, keywords = on_device(operands(case))
        query, *rest = args

        def call(query: Tensor, rest: list = rest, keywords: dict = keywords) -> Tensor:
            return fused_attention(query * 1.0, *rest, **keywords) + 0.0

        with torch.inference_mode(), fixed_tile(None) as asked:
            found = torch.compile(call, fullgraph=True)(query)
        wanted = fused_attention_oracle(*args, **keywords)
        yield judged("torch.compile", f"{code}, group {group}", case, asked, found, wanted)


def large_offsets() -> Iterable[Outcome]:
    """Payloads of more than 2^31 elements: the last sequence and head lie behind what 32 bits reach."""
    case = DecodeCase(dtype="bfloat16")
    for name, shape, code, bits in (
        ("bf16", DecodeShape(9, 131_072, 32, 32), "float", 16),
        ("int8", DecodeShape(34, 131_072, 32, 8), "symmetric", 8),
        ("int4", DecodeShape(17, 131_072, 64, 32, 128, 64, 64), "symmetric", 4),
    ):
        some = random_operands(shape, code, bits)
        if some.part.key.payload.numel() <= 2**31:
            raise ValueError(f"{name}: {some.part.key.payload.numel()} elements are not more than 2^31")
        with torch.inference_mode(), fixed_tile(None) as asked:
            found = fused_attention(some.query, [some.part], some.rotation, scaling=some.scaling)
        for sequence in (0, shape.batch - 1):
            one = some.of_sequence(sequence)
            wanted = fused_attention_oracle(one.query, [one.part], one.rotation, scaling=one.scaling)
            kept = found[sequence : sequence + 1]
            yield judged("over 2^31 elements", f"{name}, sequence {sequence}", case, asked, kept, wanted)
        del some
        torch.cuda.empty_cache()


SPECIAL: dict[str, Callable[[], Iterable[Outcome]]] = {
    "CUDA graph": graph_replays,
    "torch.compile": compiled,
    "over 2^31 elements": large_offsets,
}


def report(outcomes: list[Outcome]) -> None:
    """The largest error of each group, dtype and kernel, then everything that is wrong."""
    by: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        by.setdefault((outcome.group, outcome.dtype, " + ".join(outcome.kernels)), []).append(outcome)
    rows = []
    for key, some in by.items():
        largest, wrong = max(outcome.error for outcome in some), sum(bool(outcome.complaint) for outcome in some)
        rows.append([*key, str(len(some)), f"{largest:.1e}", str(wrong)])
    print(text_table(["", "dtype", "kernel", "cases", "largest error", "wrong"], rows))
    for outcome in outcomes:
        if outcome.complaint:
            print(f"wrong: {outcome.group}: {outcome.case}: {outcome.complaint}")


if __name__ == "__main__":
    main()
