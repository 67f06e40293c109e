"""Tables of benchmarks/headguard.py: guarded heads beside random ones and beside uniform storage of equal bytes."""

import statistics
from typing import Any

from hf_wsvd.evaluate.tables import markdown_table, text_table
from record import with_note


Rows = list[dict[str, Any]]
# Where selectors are compared: scheme, bits, group size, fraction.
COMPARED = [("hadamard", 2, None, 1 / 8), ("minmax", 2, None, 1 / 4), ("minmax", 2, None, 1 / 2)]
OURS = "restoration"


def percent(rows: Rows, field: str = "accuracy") -> str:
    """Mean and, over several draws or calibration seeds, standard deviation, in percent."""
    values = [100 * row[field] for row in rows if row[field] is not None]
    if not values:
        return ""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def fraction_text(fraction: float) -> str:
    return "0" if fraction == 0 else f"1/{round(1 / fraction)}"


def base_of(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("scheme", "key_bits", "value_bits", "group_size"))


def base_text(base: tuple) -> str:
    """`minmax 2 bit, groups of 32`."""
    scheme, key, value, group = base
    bits = f"{key} bit" if key == value else f"K{key} V{value}"
    return f"{scheme} {bits}" + ("" if group is None else f", groups of {group}")


def chosen(results: dict[str, Any], **fields: Any) -> Rows:
    """Mean rows of the results whose fields are as given."""
    rows = (row for row in results["rows"] if row["question_type"] == "mean")
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def main_lines(results: dict[str, Any], cache: str, protect: str) -> list[list[str]]:
    """By base and fraction: none, headguard, random, our own selector, the uniform control, bits."""
    lines = []
    for base in dict.fromkeys(base_of(row) for row in chosen(results, cache=cache, protect=protect, guard_bits=16)):
        fields = dict(zip(("scheme", "key_bits", "value_bits", "group_size"), base))
        if fields["key_bits"] != fields["value_bits"]:
            continue
        for fraction in sorted({row["fraction"] for row in chosen(results, cache=cache, protect=protect, **fields)}):
            cell = {"cache": cache, "protect": protect, "fraction": fraction, "guard_bits": 16, **fields}
            by_selector = {name: chosen(results, selector=name, **cell) for name in ("headguard", "random", OURS)}
            rows = chosen(results, **cell)
            if not rows:
                continue
            bits = [f"{rows[0][name]:.2f}" for name in ("bits_per_element", "whole_cache_bits_per_element")]
            controls = []
            for prefix in ("uniform_control", "best_uniform"):
                value = percent(rows[:1], f"{prefix}_accuracy")
                controls.append(f"{value} ({rows[0][prefix]})" if value else "")
            none = percent(chosen(results, cache=cache, selector="none", **fields))
            accuracies = [percent(by_selector[name]) for name in ("headguard", "random", OURS)]
            lines.append([base_text(base), fraction_text(fraction), none, *accuracies, *controls, *bits])
    return lines


MAIN_HEADER = [
    "base",
    "guarded",
    "none",
    "headguard",
    "random",
    OURS,
    "uniform, same scheme",
    "uniform, any scheme",
    "bits",
    "whole cache",
]


def note_of(results: dict[str, Any]) -> str:
    """What all tables say of their numbers."""
    settings = results["settings"]
    full = ", ".join(
        f"{100 * settings[f'{cache}_full_precision']:.1f} {cache}"
        for cache in ("dense", "latent")
        if f"{cache}_full_precision" in settings
    )
    return (
        f"Right answers in percent, mean of four types of {settings['questions_per_type']} questions (full "
        f"precision: {full}); ± is the standard deviation over calibration seeds of {settings['scenes']} scenes, "
        f"or random draws; bits an element of image keys and values, all counted but room to grow; {settings['dtype']}"
    )


def headguard_main(results: dict[str, Any]) -> str:
    """One table for each cache and protection."""
    paragraphs = []
    names = {"k": "keys guarded", "kv": "keys and values guarded"}
    for cache in ("dense", "latent"):
        for protect, name in names.items():
            lines = main_lines(results, cache, protect)
            if lines:
                title = "Dense keys and values" if cache == "dense" else "Latents of half the width"
                paragraphs += [f"{title}, {name}.", markdown_table(MAIN_HEADER, lines)]
    return with_note("\n\n".join(paragraphs), note_of(results), results)


def headguard_selectors(results: dict[str, Any]) -> str:
    """All selectors at three cells."""
    header = ["selector", "protects"]
    header += [f"{scheme} {bits} bit, {fraction_text(fraction)}" for scheme, bits, _, fraction in COMPARED]
    lines = []
    for cache in ("dense", "latent"):
        for selector in dict.fromkeys(row["selector"] for row in chosen(results, cache=cache)):
            for protect in ("k", "kv") if selector != "none" else (None,):
                cells = []
                for scheme, bits, group, fraction in COMPARED:
                    cell = {"scheme": scheme, "key_bits": bits, "value_bits": bits, "group_size": group}
                    if selector != "none":
                        cell |= {"fraction": fraction, "protect": protect, "guard_bits": 16}
                    cells.append(percent(chosen(results, cache=cache, selector=selector, **cell)))
                if any(cells):
                    lines.append([f"{selector}, {cache}", (protect or "").upper(), *cells])
    return with_note(markdown_table(header, lines), note_of(results), results)


def headguard_recipes(results: dict[str, Any]) -> str:
    """The best storage under several limits of bits, guarded and uniform."""
    lines = []
    for cache in ("dense", "latent"):
        guarded = group_means([row for row in chosen(results, cache=cache) if row["selector"] != "none"])
        uniform = [row for row in results["uniform"] if row["cache"] == cache and row["question_type"] == "mean"]
        for limit in (2.0, 2.5, 2.75, 3.0, 3.2, 3.5, 4.0):
            best = max((g for g in guarded if g[1] <= limit), key=lambda g: (g[0], -g[1]), default=None)
            even = max(
                (row for row in uniform if row["bits_per_element"] <= limit),
                key=lambda row: (row["accuracy"], -row["bits_per_element"]),
                default=None,
            )
            if best or even:
                left = [f"{100 * best[0]:.1f}", f"{best[1]:.2f}", best[2]] if best else ["", "", ""]
                right = (
                    [f"{100 * even['accuracy']:.1f}", f"{even['bits_per_element']:.2f}", even["label"]]
                    if even
                    else ["", "", ""]
                )
                lines.append([cache, f"{limit:g}", *left, *right])
    header = ["cache", "bits up to", "guarded", "bits", "recipe", "uniform", "bits", "storage"]
    return with_note(markdown_table(header, lines), note_of(results), results)


def group_means(rows: Rows) -> list[tuple[float, float, str]]:
    """(accuracy, bits, description), each the mean over seeds."""
    cells: dict[tuple, Rows] = {}
    for row in rows:
        key = (*base_of(row), row["selector"], row["fraction"], row["protect"], row["guard_bits"])
        cells.setdefault(key, []).append(row)
    found = []
    for key, members in cells.items():
        base, (selector, fraction, protect, bits) = key[:4], key[4:]
        text = f"{base_text(base)}; {selector} {fraction_text(fraction)} {protect.upper()} at {bits} bit"
        found.append(
            (statistics.mean(m["accuracy"] for m in members), max(m["bits_per_element"] for m in members), text)
        )
    return found


def headguard_uniform_wins(results: dict[str, Any]) -> str:
    """Cells where uniform storage of no more bits, of the same scheme or of any, is at least as good as guards."""
    lines = []
    for cache in ("dense", "latent"):
        counts: dict[tuple, list[bool]] = {}
        for selector in ("headguard", OURS):
            for row in chosen(results, cache=cache, selector=selector, guard_bits=16):
                for prefix in ("uniform_control", "best_uniform"):
                    value = row[f"{prefix}_accuracy"]
                    wins = value is not None and value >= row["accuracy"]
                    counts.setdefault((base_of(row), row["protect"], selector, prefix), []).append(wins)
        for base, protect in dict.fromkeys(key[:2] for key in counts):
            cells = [
                counts.get((base, protect, selector, prefix), [])
                for selector in ("headguard", OURS)
                for prefix in ("uniform_control", "best_uniform")
            ]
            lines.append([cache, base_text(base), protect.upper(), *(f"{sum(c)} of {len(c)}" for c in cells)])
    kinds = [f"{who}: {scheme} scheme" for who in ("headguard", OURS) for scheme in ("same", "any")]
    note = (
        "Cells (fractions and calibration seeds) where uniform storage of no more bits is no worse than 16-bit guards"
    )
    header = ["cache", "base", "guarded", *kinds]
    return with_note(markdown_table(header, lines), f"{note}. {note_of(results)}", results)


# Of README: cache, base, selector, fraction, guard bits; keys are guarded.
SUMMARY = [
    ("dense", ("hadamard", 2, 2, None), "none", 0.0, None),
    ("dense", ("hadamard", 2, 2, None), "headguard", 1 / 8, 16),
    ("dense", ("hadamard", 2, 2, None), OURS, 1 / 8, 16),
    ("dense", ("turboquant", 2, 2, None), OURS, 1 / 4, 4),
    ("dense", ("hadamard", 2, 2, None), OURS, 1 / 2, 4),
    ("latent", ("minmax", 2, 2, None), "none", 0.0, None),
    ("latent", ("minmax", 2, 2, None), "headguard", 1 / 16, 16),
    ("latent", ("minmax", 2, 2, None), OURS, 1 / 16, 16),
]
OF_CACHE = {"dense": "keys and values", "latent": "latents, rank ratio 0.5"}


def headguard_summary(results: dict[str, Any]) -> str:
    """A few cells that show what guards are good for."""
    full = results["settings"]["dense_full_precision"]
    lines = [["keys and values, 16 bit", "", "16.00", f"{100 * full:.1f}", ""]]
    for cache, base, selector, fraction, bits in SUMMARY:
        fields = dict(zip(("scheme", "key_bits", "value_bits", "group_size"), base))
        rows = chosen(results, cache=cache, selector=selector, fraction=fraction, guard_bits=bits, **fields)
        rows = [row for row in rows if row["protect"] in ("k", None)]
        if not rows:
            continue
        guards = "" if bits is None else f"{selector}, {fraction_text(fraction)} of the key heads at {bits} bit"
        control = rows[0]["best_uniform_accuracy"]
        lines.append(
            [
                f"{OF_CACHE[cache]}, {base_text(base)}",
                guards,
                f"{rows[0]['bits_per_element']:.2f}",
                percent(rows),
                "" if control is None or bits is None else f"{100 * control:.1f} ({rows[0]['best_uniform']})",
            ]
        )
    header = ["image tokens", "guarded", "bits an element", "right answers, %", "best uniform cache of no more bits"]
    return with_note(markdown_table(header, lines), note_of(results), results)


def head_guard_decode(results: dict[str, Any]) -> str:
    """Time of a decode step with guards, beside the same scheme without."""
    lines = []
    for row in results["rows"]:
        guards = "" if not row["guards"] else fraction_text(row["fraction"])
        lines.append(
            [
                f"{row['scheme']} {row['bits']} bit",
                row["tokens"],
                guards,
                f"{row['cache_bytes'] / 1e6:.1f}",
                f"{row['ms_per_token']:.1f}",
                f"{row['ratio']:.2f}",
            ]
        )
    header = ["base", "tokens packed", "guarded", "cache, MB", "ms a token", "of the same without guards"]
    note = f"{results['model']}; {results['prompt_tokens']:,} cached tokens, {results['image_share']:.0%} of images"
    return with_note(markdown_table(header, lines), note, results)


def headguard_agreement(results: dict[str, Any]) -> str:
    """How other selectors rank heads beside headguard."""
    lines = []
    for cache in ("dense", "latent"):
        entries = [entry for entry in results["agreement"] if entry["cache"] == cache]
        for selector in dict.fromkeys(entry["selector"] for entry in entries):
            own = [entry for entry in entries if entry["selector"] == selector]
            correlation = statistics.mean(entry["spearman"] for entry in own)
            overlaps = [
                f"{100 * statistics.mean(entry['overlap'][name] for entry in own):.0f}" for name in own[0]["overlap"]
            ]
            lines.append([cache, selector, f"{correlation:.2f}", *overlaps])
    fractions = results["agreement"][0]["overlap"] if results["agreement"] else ()
    header = ["cache", "selector", "rank correlation", *(f"common at {fraction_text(float(f))}, %" for f in fractions)]
    key_range = "the norm of the key biases and the range of key channels"
    if not results["settings"]["key_biases"]:
        key_range = "the range of key channels alone: this model has no key biases"
    note = (
        "Spearman's rank correlation with headguard of the first calibration seed, and the share of its guarded key "
        f"heads that others guard too (chance: the fraction). key_range is {key_range}"
    )
    return with_note(markdown_table(header, lines), note, results)


def short_table(results: dict[str, Any]) -> str:
    """What a run prints at its end."""
    parts = []
    for cache in ("dense", "latent"):
        for protect in ("k", "kv"):
            lines = main_lines(results, cache, protect)
            if lines:
                parts.append(f"{cache}, protect {protect}\n" + text_table(MAIN_HEADER, lines))
    return "\n\n".join(parts)
