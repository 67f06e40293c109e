"""One decode step over latents against dense attention, kernel by kernel, on a GPU with a cold L2 cache.

    python benchmarks/decode.py --output docs/results/decode_h200.json
    python benchmarks/decode.py --rows mha --baseline docs/results/decode_h200.json      # exits with 1 if slower

Every number is over many replays of a CUDA graph of one call, which takes its inputs in turn from sets that are three
times the L2 cache together. The floor is what reading payloads and scales takes at the bandwidth that a plain sum
reaches in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from decode_baselines import BASELINES, SLOW_TO_SET_UP, Dense, NotApplicable, random_dense
from decode_kernels import DENSE_TILES, WSVD_TILES, dense_split_k, fitting_wsvd, wsvd_method
from decode_shapes import ROWS, Form, Row
from decode_tables import KEYS, regressions
from hf_wsvd.evaluate.decode_operands import DecodeShape, Operands, random_operands
from hf_wsvd.evaluate.device_timing import Times, cold_times, input_sets, read_bandwidth
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.files import write_text
from hf_wsvd.kernels.decode_oracle import fused_attention_oracle
from hf_wsvd.kernels.fused_attention import fused_attention
from hf_wsvd.kernels.tiles import fixed_tile
from record import command_line


TOLERANCE = 2e-2  # relative, of bf16 results
REPLAYS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file, written again after every shape")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="groups of rows; default: all")
    parser.add_argument("--baseline", type=Path, help="earlier results: exit with 1 where ours became slower")
    parser.add_argument("--tolerance", type=float, default=0.03, help="what a time may grow by, relative")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=list(BASELINES), help="default: all")
    parser.add_argument("--replays", type=int, default=REPLAYS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none here")
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    results: dict[str, Any] = {
        "command": command_line("decode.py"),
        "environment": {**environment("cuda"), "triton": triton.__version__},
        "read_bandwidth": bandwidth,
        "rows": [],
        "not_run": {},
    }
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        for row in [row for name in arguments.rows for row in ROWS[name]]:
            dense, missing = dense_times(row, arguments.baselines, arguments.replays)
            results["not_run"] = missing | results["not_run"]
            for form in row.forms:
                measured = measure(row.shape, form, arguments.replays, bandwidth)
                measured["dense_ms"] = {name: times.median for name, times in dense.items()}
                measured["dense_ms_p10_p90"] = {name: [times.p10, times.p90] for name, times in dense.items()}
                measured["speedup_vs_best_dense"] = min(measured["dense_ms"].values()) / measured["ms"]
                results["rows"].append(measured)
                print(line(measured), flush=True)
            if arguments.output:
                write_text(arguments.output, json.dumps(results, indent=2) + "\n")
    for name, reason in results["not_run"].items():
        print(f"not run: {name}: {reason}")
    if arguments.baseline:
        slower = regressions(results, json.loads(arguments.baseline.read_text()), arguments.tolerance)
        print("\n".join(slower) or f"no row more than {arguments.tolerance:.0%} slower than {arguments.baseline}")
        sys.exit(bool(slower))


def measure(shape: DecodeShape, form: Form, replays: int, bandwidth: float) -> dict[str, Any]:
    """A row of the results without its baselines: ours, the floor, and the published kernel's method."""
    sets = rotating(lambda: random_operands(shape, form.code, form.bits), lambda operands: operands.cache_bytes())
    with fixed_tile(None) as asked:
        ours(sets[0])
    times = cold_times([lambda operands=operands: ours(operands) for operands in sets], replays)
    wanted = expected(sets[0])
    must_agree(ours(sets[0]), wanted, f"ours, {form.code} {form.bits}")
    other = {}
    if fitting_wsvd(sets[0]):
        other["wsvd_method"] = fastest(wsvd_method, sets, WSVD_TILES, replays).median
        got = wsvd_method(sets[0], WSVD_TILES[0]).transpose(1, 2)
        must_agree(got, wanted, f"WSVD's method, {form.code} {form.bits}")
    read = sets[0].cache_bytes()
    floor = 1e3 * read / bandwidth
    sizes = {**shape._asdict(), "rank": shape.key_rank, "code": form.code, "bits": form.bits}
    return {
        "device": torch.cuda.get_device_name(),
        **{key: sizes[key] for key in KEYS},
        "kernel": " + ".join(dict.fromkeys(asked)) or "torch",
        "ms": times.median,
        "ms_p10": times.p10,
        "ms_p90": times.p90,
        "replays": times.replays,
        "floor_ms": floor,
        "gb_per_s": read / times.median / 1e6,
        "share_of_read_bandwidth": floor / times.median,
        "other_ms": other,
    }


def ours(operands: Operands) -> Tensor:
    """The kernel that the package would run, `[B, 1, Hq, D]`."""
    return fused_attention(operands.query, [operands.part], operands.rotation, scaling=operands.scaling)


def expected(operands: Operands) -> Tensor:
    """The same by definition for the first sequence."""
    first = operands.of_sequence(0)
    return fused_attention_oracle(first.query, [first.part], first.rotation, scaling=first.scaling)


def dense_times(row: Row, names: Sequence[str], replays: int) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of the baselines on a shape, and why others did not run."""
    sets = rotating(lambda: random_dense(row.shape), lambda dense: dense.key.nbytes + dense.value.nbytes)
    reference = by_definition(sets[0])
    found, missing = {}, {}
    for name, prepare in BASELINES.items():
        if name not in names:
            missing[name] = "not asked for"
            continue
        if not row.all_baselines and name in SLOW_TO_SET_UP:
            continue
        try:
            calls = [prepare(dense) for dense in sets]
            must_agree(calls[0](), reference, name)
            found[name] = cold_times(calls, replays)
        except NotApplicable:
            continue
        except Exception as error:  # whatever a library raises says that it does not run here
            missing[name] = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    if row.shape.query_heads // row.shape.kv_heads <= 16:
        split_k = lambda dense, tile: dense_split_k(*dense, tile)  # noqa: E731
        found["Triton split-K"] = fastest(split_k, sets, DENSE_TILES, replays)
        must_agree(split_k(sets[0], DENSE_TILES[0]), reference, "Triton split-K")
    return found, missing


def by_definition(dense: Dense) -> Tensor:
    """Attention of the first sequence in fp64, `[1, Hq, 1, D]`."""
    query, key, value = (tensor[:1] for tensor in dense[:3])
    out = []
    for head in range(query.shape[1]):
        k, v = key[:, head // dense.group].double(), value[:, head // dense.group].double()
        weights = torch.softmax(query[:, head].double() @ k.transpose(1, 2) * dense.scaling, dim=-1)
        out.append(weights @ v)
    return torch.stack(out, dim=1)


def fastest(function: Callable, sets: Sequence, tiles: Sequence, replays: int) -> Times:
    """The times of `function(set, tile)` with the tile that is the fastest in a short trial."""

    def calls(tile) -> list[Callable[[], Tensor]]:
        return [lambda operands=operands: function(operands, tile) for operands in sets]

    best = min(tiles, key=lambda tile: cold_times(calls(tile), replays=10).median)
    return cold_times(calls(best), replays)


def rotating(make: Callable[[], Any], size: Callable[[Any], int]) -> list:
    """As many sets of inputs as a cold cache needs."""
    gc.collect()
    torch.cuda.empty_cache()
    first = make()
    return [first, *(make() for _ in range(input_sets(size(first)) - 1))]


def must_agree(got: Tensor, wanted: Tensor, name: str) -> None:
    """Raises ValueError where the first sequence of a result is wrong."""
    got = got[: len(wanted)].double()
    difference = ((got - wanted).norm() / wanted.norm()).item()
    if not difference < TOLERANCE:
        raise ValueError(f"{name} differs from the definition by {difference:.2g}")


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    best = min(row["dense_ms"], key=row["dense_ms"].get)
    others = "".join(f"; {name} {ms:.4f}" for name, ms in row["other_ms"].items())
    return (
        f"{row['query_heads']}/{row['kv_heads']} x {row['head_dim']}, rank {row['rank']}, B{row['batch']} "
        f"L{row['tokens']}, {row['code']} {row['bits']}: {row['ms']:.4f} ms ({row['kernel']}), floor "
        f"{row['floor_ms']:.4f}, {row['share_of_read_bandwidth']:.0%}; {best} {row['dense_ms'][best]:.4f}: "
        f"{row['speedup_vs_best_dense']:.2f}x{others}"
    )


if __name__ == "__main__":
    main()
