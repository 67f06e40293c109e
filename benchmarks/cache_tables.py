"""Tables of what caches hold, take and lose."""

from typing import Any

from fit_tables import number
from hf_wsvd.evaluate.tables import markdown_table
from record import with_note


# A task's headline metric, and what it stands for.
HEADLINES = {
    "vlm": ("accuracy_mean", "Measuring model: right answers, %, mean of at, list, count and where"),
    "wikipedia": ("perplexity_wikipedia", "SmolLM2: perplexity of Wikipedia"),
    "context": ("accuracy_exact", "SmolLM2: right answers about a passage, %"),
}


def cache_bytes(results: dict[str, Any]) -> str:
    """Bits an element by cache and width of a head."""
    widths = sorted({row["head_dim"] for row in results["rows"]})
    kinds = {"all": "bits_per_element", "codes and scales": "bits_of_codes_and_scales"}
    cells = {
        (row["label"], row["head_dim"], kind): f"{row[kind]:.2f}"
        for row in results["rows"]
        for kind in kinds.values()
        if kind in row
    }
    columns = [(width, kind) for width in widths for kind in kinds]
    labels = dict.fromkeys(row["label"] for row in results["rows"])
    lines = [[label, *(cells.get((label, w, kinds[kind]), "") for w, kind in columns)] for label in labels]
    note = (
        f"{results['model']}; {results['tokens']:,} tokens; all: with windows, constants and memory for tokens to come"
    )
    header = ["bits an element", *(f"width {width}, {kind}" for width, kind in columns)]
    return with_note(markdown_table(header, lines), note, results)


def cache_memory(results: dict[str, Any]) -> str:
    """Bytes, peak memory and times by cache."""
    header = ["", "cache, MB", "bits an element", "peak, MB", "prompt, s", "token, ms", "fastest token, ms"]
    lines = [
        [
            row["label"],
            f"{row['cache_bytes'] / 1e6:.1f}",
            f"{row['bits_per_element']:.2f}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['prefill_s']:.2f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['fastest_ms_per_token']:.1f}",
        ]
        for row in results["rows"]
    ]
    versions = "".join(f", {name} {version}" for name, version in results["versions"].items())
    failed = "".join(f" {row['label']} did not run: {row['reason']}." for row in results["failed"])
    note = (
        f"{results['model']}{versions}; a prompt of {results['prompt_tokens']:,} tokens and "
        f"{results['new_tokens']:,} more, each row in a process of its own; peak: on top of the model; token: the "
        f"median.{failed}".removesuffix(".")
    )
    return with_note(markdown_table(header, lines), note, results)


def cache_quality(results: dict[str, Any]) -> str:
    """Bits and the headline metric of every cache, one table a task."""
    paragraphs = []
    for task, (metric, title) in HEADLINES.items():
        rows = [row for row in results["rows"] if row["task"] == task and row["metric"] == metric]
        if rows:
            scale = 100 if metric.startswith("accuracy") else 1
            cells = {(row["label"], row["cache"]): quality_cells(row, scale) for row in rows}
            labels = dict.fromkeys(row["label"] for row in rows)
            lines = [
                [label, *(cell for cache in ("dense", "latent") for cell in cells.get((label, cache), ("", "")))]
                for label in labels
            ]
            header = ["", "dense: bits", "value", "latent: bits", "value"]
            paragraphs += [f"{title}.", markdown_table(header, lines)]
    described = "; ".join(
        f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in task.items())
        for name, task in results["tasks"].items()
    )
    note = f"Bits an element of the dense cache; ± is the standard error over questions or windows; {described}"
    return with_note("\n\n".join(paragraphs), f"{note}; {results['dtype']}", results)


SUMMARY = {
    "dense": ["DynamicCache", "minmax 8 bit", "hadamard 4 bit", "hadamard 3 bit", "hadamard 2 bit"],
    "latent": ["DynamicCache", "minmax 8 bit", "minmax 4 bit", "minmax 3 bit", "minmax 2 bit"],
}


def cache_quality_summary(results: dict[str, Any]) -> str:
    """What `WSVDCache(model, bits=...)` takes and costs, dense and over latents."""
    names = {"dense": "keys and values", "latent": "latents, rank ratio 0.5"}
    lines = []
    for kind, labels in SUMMARY.items():
        for label in labels:
            rows = {
                (row["task"], row["metric"]): row
                for row in results["rows"]
                if row["cache"] == kind and row["label"] == label
            }
            answers = rows["vlm", "accuracy_mean"]
            cells = [f"{answers['bits_per_element']:.2f}", number(100 * answers["value"])]
            cells.append(number(rows["wikipedia", "perplexity_wikipedia"]["value"]))
            setting = "16 bit" if label == "DynamicCache" else " ".join(label.split()[1:])
            lines.append([f"{names[kind]}, {setting}", *cells])
    header = ["", "bits an element of the dense cache", "right answers, %", "perplexity"]
    note = "Measuring model (right answers, scales and room to grow counted) and SmolLM2 on Wikipedia (perplexity)"
    return with_note(markdown_table(header, lines), note, results)


def quality_cells(row: dict[str, Any], scale: float) -> tuple[str, str]:
    """Bits, and value ± standard error."""
    return (
        f"{row['bits_per_element']:.2f}",
        f"{number(scale * row['value'])} ± {number(scale * row['standard_error'])}",
    )
