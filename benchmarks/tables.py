"""Rewrite the tables of README.md and docs/ from docs/results/*.json.

    python benchmarks/tables.py            # rewrite
    python benchmarks/tables.py --check    # exit with 1 if a committed table is not what its results say

A table stands between `<!-- table:NAME -->` and `<!-- end -->` and comes from docs/results/NAME.json (NAME_summary: a
short form of the same; NAME_baselines: what it compares with; headguard_vlm_PART: from headguard_vlm.json). Nothing
between them stands for results that do not exist yet.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_tables import cache_bytes, cache_memory, cache_quality, cache_quality_summary
from decode_tables import decode, decode_baselines, decode_summary, kernels_check
from fit_tables import fit_smollm2, fit_summary, fit_time_h200, fit_vlm
from headguard_tables import (
    head_guard_decode,
    headguard_agreement,
    headguard_main,
    headguard_recipes,
    headguard_selectors,
    headguard_summary,
    headguard_uniform_wins,
)
from hf_wsvd.evaluate.tables import markdown_table
from record import with_note


ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def demo(results: dict[str, Any]) -> str:
    """Accuracy and cache bytes of the embedded model."""
    kinds = [kind for kind in results["rows"][0]["accuracy"] if kind != "all"]
    header = ["", "KV bytes a token", "of dense", "right answers, %", *kinds, "KL, nats"]
    lines = []
    for row in results["rows"]:
        everything = row["accuracy"]["all"]
        lines.append(
            [row["label"], f"{row['kv_bytes_per_token']:,.0f}", f"{row['kv_share_of_dense']:.1%}"]
            + [f"{100 * everything['mean']:.1f} ± {100 * everything['standard_error']:.1f}"]
            + [f"{100 * row['accuracy'][kind]['mean']:.0f}" for kind in kinds]
            + ["" if row["divergence"] is None else f"{row['divergence']['kl']:.4f}"]
        )
    note = (
        f"{results['rows'][0]['accuracy']['all']['total']} questions, {results['questions_per_type']} of each type, "
        f"seed {results['seed']}; KL to the dense model at the answers of {results['compared_questions']} of them"
    )
    return with_note(markdown_table(header, lines), note, results)


def decode_cpu(results: dict[str, Any]) -> str:
    """Time of a decode step."""
    header = ["", "step, ms", "turns from … to, ms", "times as fast"]
    lines = [
        [
            row["label"],
            f"{row['step_ms']:.1f}",
            f"{row['fastest_turn_ms']:.1f} … {row['slowest_turn_ms']:.1f}",
            f"{row['speedup']:.2f}",
        ]
        for row in results["rows"]
    ]
    note = f"{results['model']}; {results['context']:,} cached tokens"
    return with_note(markdown_table(header, lines), note, results)


def fisher_solvers(results: dict[str, Any]) -> str:
    """Loss and time of the solvers of the Fisher-weighted refinement."""
    header = ["", "loss", "unweighted error", "output error", "seconds", "from … to"]
    lines = [
        [
            row["label"],
            f"{row['loss']:.4f}",
            f"{row['unweighted_error']:.4f}",
            f"{row['output_error']:.4f}",
            f"{row['seconds']:.3f}",
            f"{row['fastest_seconds']:.3f} … {row['slowest_seconds']:.3f}",
        ]
        for row in results["rows"]
    ]
    note = (
        f"A synthetic projection of {results['heads']} heads of {results['head_dim']} with "
        f"{results['in_features']:,} inputs at rank {results['rank']}; log-normal Fisher information, standard "
        f"deviation of its logarithm {results['spread']:g}; seconds are the median of {results['repeats']} runs"
    )
    return with_note(markdown_table(header, lines), note, results)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo,
    "decode_cpu": decode_cpu,
    "fit_vlm": fit_vlm,
    "fit_smollm2": fit_smollm2,
    "fit_time_h200": fit_time_h200,
    "fisher_solvers": fisher_solvers,
    "cache_bytes": cache_bytes,
    "cache_memory_cpu": cache_memory,
    "cache_memory_h200": cache_memory,
    "cache_quality": cache_quality,
    "cache_quality_summary": cache_quality_summary,
    "head_guard_decode_cpu": head_guard_decode,
    "headguard_vlm_summary": headguard_summary,
    "headguard_vlm_main": headguard_main,
    "headguard_vlm_selectors": headguard_selectors,
    "headguard_vlm_recipes": headguard_recipes,
    "headguard_vlm_uniform_wins": headguard_uniform_wins,
    "headguard_vlm_agreement": headguard_agreement,
    "decode_h200": decode,
    "decode_h200_summary": decode_summary,
    "decode_h200_baselines": decode_baselines,
    "kernels_check_h200": kernels_check,
    "fit_vlm_summary": fit_summary,
    "fit_smollm2_summary": fit_summary,
}


def rewritten(text: str, results_folder: Path) -> str:
    """`text` with every table made anew.

    Raises KeyError for an unknown name, FileNotFoundError for a table without results.
    """

    def block(match: re.Match) -> str:
        name = match.group(2)
        source = "headguard_vlm" if name.startswith("headguard_vlm_") else re.sub("_(summary|baselines)$", "", name)
        path, empty = results_folder / f"{source}.json", match.group(0) == match.group(1) + match.group(3)
        if empty and not path.exists():
            return match.group(0)
        results = json.loads(path.read_text(encoding="utf-8"))
        return f"{match.group(1)}{TABLES[name](results)}\n{match.group(3)}"

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    """The Markdown files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, ROOT / "docs" / "results")
        if new != text:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(page.relative_to(ROOT), "is out of date" if "--check" in sys.argv else "rewritten")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
