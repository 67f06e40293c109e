"""Tables of the decode kernels: how fast against dense attention, how right against the definition."""

from typing import Any

from hf_wsvd.evaluate.tables import markdown_table
from record import with_note


# What makes a row: the same in two runs, and their times can be compared.
KEYS = ("batch", "tokens", "query_heads", "kv_heads", "head_dim", "rank", "code", "bits")


def decode(results: dict[str, Any]) -> str:
    """Every shape and form: time, floor, and how it stands to the best dense kernel of the same run."""
    header = [
        *("query/KV heads x size, rank", "batch x tokens", "cache", "ms", "p10 … p90", "floor, ms", "GB/s"),
        *("of read bandwidth", "best dense, ms", "times as fast", "WSVD's own method, ms"),
    ]
    lines = []
    for row in results["rows"]:
        best = min(row["dense_ms"], key=row["dense_ms"].get)
        published = row["other_ms"].get("wsvd_method")
        lines.append(
            [
                f"{row['query_heads']}/{row['kv_heads']} x {row['head_dim']}, {row['rank']}",
                f"{row['batch']} x {row['tokens']:,}",
                form_name(row["code"], row["bits"]),
                f"{row['ms']:.4f}",
                f"{row['ms_p10']:.4f} … {row['ms_p90']:.4f}",
                f"{row['floor_ms']:.4f}",
                f"{row['gb_per_s']:,.0f}",
                f"{row['share_of_read_bandwidth']:.0%}",
                f"{row['dense_ms'][best]:.4f} ({best})",
                f"{row['speedup_vs_best_dense']:.2f}",
                "" if published is None else f"{published:.4f}",
            ]
        )
    names = sorted({name for row in results["rows"] for name in row["dense_ms"]})
    note = (
        f"Median of at least {min(row['replays'] for row in results['rows'])} replays of a CUDA graph of one call, "
        f"inputs not in the L2 cache; a plain sum reads {results['read_bandwidth'] / 1e12:.2f} TB/s here. Dense "
        f"baselines in bf16, the best of {', '.join(names)}"
    )
    return with_note(markdown_table(header, lines), note, results)


def decode_summary(results: dict[str, Any]) -> str:
    """A line a shape: how many times as fast as the best dense kernel each form is."""
    forms = list(dict.fromkeys(form_name(row["code"], row["bits"]) for row in results["rows"]))
    shapes: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results["rows"]:
        shape = (f"{row['query_heads']}/{row['kv_heads']}", f"{row['batch']} x {row['tokens']:,}")
        shapes.setdefault(shape, {})[form_name(row["code"], row["bits"])] = row
    lines = []
    for shape, rows in shapes.items():
        dense = min(next(iter(rows.values()))["dense_ms"].values())
        cells = [f"{rows[form]['speedup_vs_best_dense']:.2f}" if form in rows else "" for form in forms]
        lines.append([*shape, f"{dense:.4f}", *cells])
    header = ["query/KV heads", "batch x tokens", "best dense, ms", *(f"{form}, times as fast" for form in forms)]
    return with_note(
        markdown_table(header, lines), "Attention of one decode step, inputs not in the L2 cache", results
    )


def decode_baselines(results: dict[str, Any]) -> str:
    """Every dense baseline by shape."""
    names = list(dict.fromkeys(name for row in results["rows"] for name in row["dense_ms"]))
    lines, seen = [], set()
    for row in results["rows"]:
        shape = [
            f"{row['query_heads']}/{row['kv_heads']} x {row['head_dim']}",
            f"{row['batch']} x {row['tokens']:,}",
        ]
        if tuple(shape) not in seen:
            lines.append(
                [*shape, *(f"{row['dense_ms'][name]:.4f}" if name in row["dense_ms"] else "" for name in names)]
            )
        seen.add(tuple(shape))
    return with_note(markdown_table(["heads", "batch x tokens", *names], lines), "Milliseconds", results)


def kernels_check(results: dict[str, Any]) -> str:
    """The largest error by group of cases, dtype and kernel, beside what rounding explains."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        found.setdefault((row["group"], row["dtype"], " + ".join(row["kernels"])), []).append(row)
    lines = []
    for key, rows in found.items():
        worst = max(rows, key=lambda row: row["error"] - row["tolerance"])
        wrong = sum(row["complaint"] is not None for row in rows)
        lines.append([*key, str(len(rows)), f"{worst['error']:.1e}", f"{worst['tolerance']:.1e}", str(wrong)])
    note = "Relative errors against the definition in fp64, of the case that comes closest to what is allowed"
    header = ["", "dtype", "kernel", "cases", "error", "allowed", "wrong"]
    return with_note(markdown_table(header, lines), note, results)


def form_name(code: str, bits: int) -> str:
    """ "bf16", "int4" or "fp8"."""
    return {"float": "bf16", "fp8": "fp8"}.get(code, f"int{bits}")


def regressions(results: dict[str, Any], before: dict[str, Any], tolerance: float) -> list[str]:
    """Rows that became slower than `tolerance` allows, in words; rows that only one of the two has do not count."""
    old = {tuple(row[key] for key in KEYS): row["ms"] for row in before["rows"]}
    found = []
    for row in results["rows"]:
        was = old.get(tuple(row[key] for key in KEYS))
        if was is not None and row["ms"] > was * (1 + tolerance):
            sizes = ", ".join(f"{key} {row[key]}" for key in KEYS)
            found.append(f"slower: {sizes}: {row['ms']:.4f} ms, was {was:.4f} ({row['ms'] / was - 1:+.1%})")
    return found
