"""`report.html`: one file with pictures, plots and tables, readable offline."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from ..evaluate.accuracy import is_correct


EXAMPLES = 12
PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 440, 250, 44


@dataclass(frozen=True)
class Point:
    """A mark in a plot, in pixels from its top left corner."""

    x: float
    y: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Plot:
    """A scatter plot of one quantity over cache size; axes start at zero."""

    title: str
    points: list[Point]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def render_report(results: dict[str, Any], dataset: Dataset) -> str:
    """The HTML of the results; pictures are taken from `dataset`, whose rows are `results["questions"]`."""
    environment = Environment(
        loader=PackageLoader("hf_wsvd.demo", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    rows = results["rows"]
    plots = [
        plot(
            "Right answers",
            [(row, row["accuracy"]["all"]["mean"], row["accuracy"]["all"]["standard_error"]) for row in rows],
            1.0,
            "{:.0%}",
        )
    ]
    distances = [(row, row["divergence"]["kl"], 0.0) for row in rows if row["divergence"]]
    if distances:
        top = round_up(max(value for _, value, _ in distances))
        plots.append(plot("KL to the dense model, nats an answer token", distances, top, "{:g}"))
    return environment.get_template("report.html.j2").render(
        results=results,
        kinds=[kind for kind in rows[0]["accuracy"] if kind != "all"],
        best=smallest_as_good(rows),
        plots=plots,
        width=PLOT_WIDTH,
        height=PLOT_HEIGHT,
        margin=PLOT_MARGIN,
        examples=examples(results["questions"], dataset),
    )


def plot(title: str, values: list[tuple[dict[str, Any], float, float]], top: float, form: str) -> Plot:
    """Place (row, value, standard error) over the row's share of dense cache bytes; the y axis ends at `top`."""
    inner_width, inner_height = PLOT_WIDTH - 2 * PLOT_MARGIN, PLOT_HEIGHT - 2 * PLOT_MARGIN

    def x(share: float) -> float:
        return round(PLOT_MARGIN + share / 1.05 * inner_width, 1)

    def y(value: float) -> float:
        return round(PLOT_HEIGHT - PLOT_MARGIN - min(max(value / top, 0), 1) * inner_height, 1)

    points = [
        Point(x(row["kv_share_of_dense"]), y(value), y(value - error), y(value + error), row["label"])
        for row, value, error in values
    ]
    shares = (0, 0.25, 0.5, 0.75, 1)
    return Plot(
        title,
        sorted(points, key=lambda point: point.x),
        [(x(share), f"{share:.0%}") for share in shares],
        [(y(share * top), form.format(share * top)) for share in shares],
    )


def round_up(value: float) -> float:
    """The next of 1, 2, 3, 4, 6, 8 times a power of ten, as the end of an axis; 1 for zero."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10) if step * power >= value)


def smallest_as_good(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The compressed row of fewest bytes with accuracy within two standard errors of the dense one; None without."""
    dense = rows[0]["accuracy"]["all"]
    good = [
        row
        for row in rows[1:]
        if row["accuracy"]["all"]["mean"] >= dense["mean"] - 2 * row["accuracy"]["all"]["standard_error"]
    ]
    return min(good, key=lambda row: row["kv_bytes_per_token"], default=None)


def examples(questions: list[dict[str, Any]], dataset: Dataset) -> list[dict[str, Any]]:
    """Questions to show, with pictures: one of each type, each about a new scene, then some that a model got wrong."""
    chosen: list[int] = []
    types: set[str] = set()
    scenes: set[int] = set()
    # A second round drops the wish for a new scene, for types that had none.
    for wants_new_scene in (True, False):
        for number, question in enumerate(questions):
            if question["question_type"] in types or (wants_new_scene and question["scene"] in scenes):
                continue
            types.add(question["question_type"])
            scenes.add(question["scene"])
            chosen.append(number)
    wrong = [n for n, q in enumerate(questions) if not all(is_correct(a, q["answer"]) for a in q["answers"].values())]
    wrong.sort(key=lambda number: questions[number]["scene"] in scenes)  # new scenes first
    chosen += [number for number in wrong if number not in chosen]
    return [
        {**questions[n], "picture": picture(dataset[n]["image"]), "groups": answer_groups(questions[n])}
        for n in chosen[:EXAMPLES]
    ]


def answer_groups(question: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(labels of the models, their common answer, whether it is right), in the models' order."""
    labels: dict[str, list[str]] = {}
    for label, answer in question["answers"].items():
        labels.setdefault(answer, []).append(label.removeprefix("WSVD "))
    return [(", ".join(group), answer, is_correct(answer, question["answer"])) for answer, group in labels.items()]


def picture(image: Image.Image) -> str:
    """A PNG as a data address."""
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
