"""Tables of the accuracy sweep and of the time of a fit."""

import math
import statistics
from typing import Any

from hf_wsvd.evaluate.tables import markdown_table
from record import with_note


def fit_vlm(results: dict[str, Any]) -> str:
    """Right answers by method and ratio, and by question type at half the bytes."""
    grid = Grid(results, "accuracy_mean", scale=100, higher_is_better=True)
    kinds = [name for name in dict.fromkeys(row["metric"] for row in results["rows"]) if name.startswith("accuracy_")]
    types = [name for name in kinds if name not in ("accuracy_mean", "accuracy_all")]
    by_type = [Grid(results, name, scale=100, higher_is_better=True, ratios=[0.5]) for name in types]
    columns = [[grid.cell(method, 0.5) for grid in by_type] for method in grid.methods]
    header = ["at ratio 0.5", *(name.removeprefix("accuracy_") for name in types)]
    dense = ", ".join(f"{name.removeprefix('accuracy_')} {grid.dense:.1f}" for name, grid in zip(types, by_type))
    settings = results["settings"]
    paragraphs = [
        f"Right answers, %, mean of at, list, count and where; dense: {grid.dense:.1f}.",
        grid.table(),
        grid.verdict("wsvd+allocation"),
        f"By question type, at half the bytes; dense: {dense}.",
        markdown_table(header, [[method, *cells] for method, cells in zip(grid.methods, columns)]),
        _prediction(results),
    ]
    note = (
        f"{results['model']}; {settings['questions_per_type']} questions of each type, calibrated on "
        f"{settings['calibration_questions_per_type']} others of each type; {grid.note()}"
    )
    return with_note("\n\n".join(filter(None, paragraphs)), note, results)


def fit_smollm2(results: dict[str, Any]) -> str:
    """Perplexity by method and ratio, of each text."""
    settings, paragraphs = results["settings"], []
    for name in settings["evaluation_windows"]:
        grid = Grid(results, f"perplexity_{name}", scale=1, higher_is_better=False)
        paragraphs += [f"Perplexity, {name}; dense: {grid.dense:.2f}.", grid.table(), grid.verdict("wsvd+allocation")]
    windows, length = settings["evaluation_windows"], settings["evaluation_window"]
    tokens = ", ".join(f"{name} {count * (length - 1):,} tokens" for name, count in windows.items())
    calibrated = settings["calibration_windows"] * settings["calibration_window"]
    note = (
        f"{results['model']}; {tokens}, windows of {length:,}; calibrated on "
        f"{calibrated:,} other tokens of each text; {grid.note()}"
    )
    return with_note("\n\n".join(filter(None, [*paragraphs, _prediction(results)])), note, results)


SHORT_METHODS = ("svd", "asvd", "svd_llm", "svd_llm+refine", "wsvd+allocation")
SHORT_RATIOS = [0.8, 0.6, 0.5, 0.4, 0.3]


def fit_summary(results: dict[str, Any]) -> str:
    """The methods that others offer and the package's default, at some ratios, without spreads."""
    text = any(row["metric"].startswith("perplexity") for row in results["rows"])
    metric, scale, what = (
        ("perplexity_wikipedia", 1, "perplexity") if text else ("accuracy_mean", 100, "right answers, %")
    )
    grid = Grid(results, metric, scale=scale, higher_is_better=not text, ratios=SHORT_RATIOS)
    lines = [["dense, all bytes", *([number(grid.dense)] + [""] * (len(SHORT_RATIOS) - 1))]]
    for method in SHORT_METHODS:
        name = "hf_wsvd" if method == "wsvd+allocation" else method
        means = [grid.mean(method, ratio) for ratio in SHORT_RATIOS]
        lines.append([name, *("" if math.isnan(mean) else number(mean) for mean in means)])
    return markdown_table([f"{what}, at KV ratio", *(f"{ratio:g}" for ratio in SHORT_RATIOS)], lines)


def fit_time_h200(results: dict[str, Any]) -> str:
    """Seconds and peak memory by stage."""
    lines = [
        [row["stage"], f"{row['seconds']:.1f}", "" if not row["peak_bytes"] else f"{row['peak_bytes'] / 2**30:.1f}"]
        for row in results["rows"]
    ]
    seconds = {row["stage"]: row["seconds"] for row in results["rows"]}
    totals = []
    for stage, fit in seconds.items():
        refinement = stage.removeprefix("fit, refinement ")
        if refinement != stage:
            collect = seconds["statistics with fisher" if refinement == "fisher" else "statistics"]
            totals.append(f"{refinement} {(collect + fit) / 60:.1f} min")
    note = (
        f"{results['model']}; {results['samples']} samples of {results['tokens_per_sample']} tokens, rank ratio "
        f"{results['rank_ratio']}; statistics and fit together by refinement: {', '.join(totals)}"
    )
    return with_note(markdown_table(["", "seconds", "peak memory, GiB"], lines), note, results)


class Grid:
    """One metric of a sweep by method and ratio: mean and spread over the calibration seeds.

    Attributes:
        values: `values[method, ratio]`, one a seed, in seed order.
        dense: the dense model's value.
    """

    def __init__(
        self,
        results: dict[str, Any],
        metric: str,
        *,
        scale: float,
        higher_is_better: bool,
        ratios: list[float] | None = None,
    ):
        rows = [row for row in results["rows"] if row["metric"] == metric]
        rows = sorted(rows, key=lambda row: row["seed"])
        self.sign = 1 if higher_is_better else -1
        self.methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
        self.ratios = ratios or sorted({row["kv_ratio"] for row in rows}, reverse=True)
        self.seeds = sorted({row["seed"] for row in rows})
        self.dense = scale * rows[0]["dense_value"]
        self.values: dict[tuple[str, float], list[float]] = {}
        self.shares: dict[tuple[str, float], float] = {}
        for row in rows:
            self.values.setdefault((row["method"], row["kv_ratio"]), []).append(scale * row["value"])
            self.shares[row["method"], row["kv_ratio"]] = row["kv_share"]

    def mean(self, method: str, ratio: float) -> float:
        """Over seeds; NaN if not measured."""
        values = self.values.get((method, ratio))
        return statistics.fmean(values) if values else math.nan

    def spread(self, method: str, ratio: float) -> float:
        """Standard deviation over seeds; NaN for fewer than two."""
        values = self.values.get((method, ratio), [])
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def average(self, method: str) -> float:
        """Over ratios; the geometric mean of perplexities, or the smallest ratio would decide alone."""
        means = [self.mean(method, ratio) for ratio in self.ratios]
        if self.sign > 0:
            return sum(means) / len(means)
        return math.exp(sum(math.log(mean) for mean in means) / len(means))

    def best(self, ratio: float) -> str:
        """The method with the best mean."""
        measured = [method for method in self.methods if (method, ratio) in self.values]
        return max(measured, key=lambda method: self.sign * self.mean(method, ratio))

    def cell(self, method: str, ratio: float) -> str:
        """Mean ± spread, bold where nothing is better."""
        mean, spread = self.mean(method, ratio), self.spread(method, ratio)
        if math.isnan(mean):
            return ""
        text = number(mean) if math.isnan(spread) else f"{number(mean)} ± {number(spread)}"
        return f"**{text}**" if mean == self.mean(self.best(ratio), ratio) else text

    def table(self) -> str:
        """Methods by ratios, with the average over ratios last."""
        averages = {method: self.average(method) for method in self.methods}
        known = [value for value in averages.values() if not math.isnan(value)]
        best = max(known, key=lambda value: self.sign * value) if known else math.nan
        lines = []
        for method, average in averages.items():
            text = "" if math.isnan(average) else number(average)
            cells = [self.cell(method, ratio) for ratio in self.ratios]
            lines.append([method, *cells, f"**{text}**" if average == best else text])
        return markdown_table(["KV ratio", *(f"{ratio:g}" for ratio in self.ratios), "average"], lines)

    def verdict(self, method: str) -> str:
        """Where `method` stands. Noise: two standard errors of the difference of two means over seeds."""
        if method not in self.methods:
            return ""
        best, near, behind = [], [], []
        for ratio in self.ratios:
            other = self.best(ratio)
            gap = abs(self.mean(other, ratio) - self.mean(method, ratio))
            noise = 2 * math.hypot(self.spread(other, ratio), self.spread(method, ratio)) / math.sqrt(len(self.seeds))
            (best if gap == 0 else near if gap <= noise else behind).append(f"{ratio:g}")
        parts = [("best", best), ("within noise of the best", near), ("behind", behind)]
        return (
            f"`{method}`: " + "; ".join(f"{label} at {', '.join(ratios)}" for label, ratios in parts if ratios) + "."
        )

    def note(self) -> str:
        """How many seeds, and how much of every head two methods keep on average."""
        text = f"mean ± standard deviation over {len(self.seeds)} calibration seeds"
        for method in ("wsvd", "wsvd+allocation"):
            kept = [self.shares.get((method, ratio)) for ratio in self.ratios]
            if None not in kept:
                text += (
                    f"; {method} keeps {' '.join(f'{100 * share:.1f}' for share in kept)} % of the heads' dimensions"
                )
        return text


def number(value: float) -> str:
    """Digits that fit the size: 12.34, 123.4, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _prediction(results: dict[str, Any]) -> str:
    """How well predicted loss orders random rank plans; nothing if it was not measured."""
    found = results.get("prediction")
    if not found:
        return ""
    parts = [
        f"{found[name]['spearman']:.3f} over {len(found[name]['plans'])} plans of {label}"
        for name, label in (("different_totals", "different totals"), ("equal_totals", "half the bytes each"))
    ]
    if "all" in found:
        parts.append(f"{found['all']['spearman']:.3f} over all of them")
    data = f" ({found['data']})" if "data" in found else ""
    text = "Rank correlation (Spearman) of predicted loss and measured KL of random rank plans"
    return f"{text}: {', '.join(parts)}{data}."
