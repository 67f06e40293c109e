"""The picture of benchmarks/cache_quality.py: quality against bits an element, one panel a task."""

from pathlib import Path
from typing import Any

from cache_tasks import HEADLINE


TITLES = {
    "vlm": "measuring model: right answers, %",
    "wikipedia": "SmolLM2: perplexity of Wikipedia (lower is better)",
    "context": "SmolLM2: right answers about a passage, %",
}
COLOURS = {
    None: "black",
    "bf16": "tab:grey",
    "fp16": "tab:grey",
    "fp8": "tab:brown",
    "minmax": "tab:orange",
    "hadamard": "tab:blue",
    "turboquant": "tab:green",
    "kivi": "tab:red",
}
MARKERS = {"dense": "o", "latent": "^"}
WORST_PERPLEXITY = 2.5  # times the stock cache's; what is above stands at the upper edge


def points(results: dict[str, Any], task: str) -> list[tuple[str, str | None, float, float]]:
    """Cache, scheme, bits an element and value (%, or perplexity) of a task's headline metric."""
    rows = [row for row in results["rows"] if row["task"] == task and row["metric"] == HEADLINE[task]]
    scale = 1 if HEADLINE[task].startswith("perplexity") else 100
    return [(row["cache"], row["scheme"], row["bits_per_element"], scale * row["value"]) for row in rows]


def plot(results: dict[str, Any], target: Path) -> None:
    """Draw every task that `results` holds into `target` (.svg or .png)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hf_wsvd"  # the same file for the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines
    import matplotlib.pyplot as plt

    tasks = [task for task in TITLES if points(results, task)]
    figure, panels = plt.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 4), squeeze=False, layout="constrained")
    for task, panel in zip(tasks, panels[0]):
        found = points(results, task)
        highest = float("inf")
        if HEADLINE[task].startswith("perplexity"):
            highest = WORST_PERPLEXITY * next(value for _, scheme, _, value in found if scheme is None)
        for cache, scheme, bits, value in found:
            style = {"marker": MARKERS[cache], "color": COLOURS[scheme], "alpha": 0.8, "linestyle": "none"}
            panel.plot([bits], [min(value, highest)], markersize=5, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        panel.set_xlabel("bits an element of the dense cache")
        panel.set_title(TITLES[task], fontsize=10)
        panel.grid(alpha=0.3)
    used = dict.fromkeys(scheme for task in tasks for _, scheme, _, _ in points(results, task))
    handles = [
        plt.Line2D([], [], marker="s", linestyle="none", color=COLOURS[scheme], label=scheme or "not quantized")
        for scheme in used
        if scheme != "fp16"
    ]
    handles += [
        plt.Line2D([], [], marker=marker, linestyle="none", color="grey", label=name)
        for name, marker in MARKERS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
