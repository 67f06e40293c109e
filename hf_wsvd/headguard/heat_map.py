"""A picture of a guard map: layers by KV heads, coloured by rank of score, guarded heads framed.

Scores of some selectors spread over many orders of magnitude: a colour for each rank shows their order.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..files import replaced_file
from ..quantizer_config import GuardMap
from ..quantizer_config.guard_map import SIDES
from .summary import printed


# Dark blue to yellow, of even steps in lightness, so that it reads in grey and for the colour-blind too.
COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
NO_SCORE, FRAME, INNER_FRAME = (214, 214, 214), (214, 39, 40), (255, 255, 255)
INK, PAPER = (30, 30, 30), (255, 255, 255)
LARGEST_CELL, SMALLEST_CELL, LARGEST_GRID = 26, 7, 960  # pixels
MOST_CELLS = 65536
MARGIN, LABELS, TITLE, LEGEND = 16, 40, 58, 64  # pixels
TEXT_SIZE = 12


def save_heat_map(guard_map: GuardMap, path: Path) -> None:
    """Write the picture of a guard map as a PNG file, whole or not at all.

    Values stand beside keys where they have guards, and their scores or guards are others.

    Raises:
        ValueError: more heads than a picture can show.
        OSError: the file cannot be written.
    """
    picture = heat_map(guard_map)
    with replaced_file(path) as stream:
        picture.save(stream, format="PNG")


def heat_map(guard_map: GuardMap) -> Image.Image:
    """The picture itself; ValueError for more heads than one can show."""
    rows, columns = len(guard_map.num_key_value_heads), max(1, *guard_map.num_key_value_heads)
    if rows * columns > MOST_CELLS:
        raise ValueError(f"a heat map shows up to {MOST_CELLS:,} heads, and the guard map has {rows} x {columns}")
    sides = SIDES if values_differ(guard_map) else SIDES[:1]
    cell = max(SMALLEST_CELL, min(LARGEST_CELL, LARGEST_GRID // max(rows, columns)))
    panel = LABELS + columns * cell
    width = max(MARGIN + len(sides) * (panel + MARGIN), 420)
    picture = Image.new("RGB", (width, TITLE + LABELS + rows * cell + LEGEND + MARGIN), PAPER)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=TEXT_SIZE)
    guarded = len({(guard.layer, guard.head) for guard in guard_map})
    title = f"{guarded} of {sum(guard_map.num_key_value_heads)} KV heads guarded, {guard_map.tokens} tokens"
    pen.text((MARGIN, 10), title, INK, font)
    pen.text((MARGIN, 28), f"selector: {printed(guard_map.selector)}", INK, font)
    for number, side in enumerate(sides):
        corner = (MARGIN + number * (panel + MARGIN) + LABELS, TITLE + LABELS)
        name = "keys and values" if len(sides) == 1 and guard_map.value else f"{side}s"
        draw_panel(pen, font, guard_map, side, name, corner, cell)
    draw_legend(pen, font, guard_map, (MARGIN, TITLE + LABELS + rows * cell + MARGIN))
    return picture


def values_differ(guard_map: GuardMap) -> bool:
    """Whether values have guards, and these or their scores are other than those of keys."""
    scores = guard_map.scores or {}
    different = guard_map.value != guard_map.key or ("value" in scores and scores.get("key") != scores["value"])
    return bool(guard_map.value) and different


def draw_panel(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont,
    guard_map: GuardMap,
    side: str,
    name: str,
    corner: tuple[int, int],
    cell: int,
) -> None:
    """One side: a row a layer, a column a head; `corner` is the upper left of the cells."""
    left, top = corner
    ordered = ordered_scores(guard_map)
    pen.text((left, top - 34), f"{name}: heads, by layer", INK, font)
    columns = max(guard_map.num_key_value_heads)
    step = math.ceil((font.getlength(str(columns)) + 4) / cell)
    for head in range(0, columns, step):
        pen.text((left + head * cell + cell / 2 - 1, top - 4), str(head), INK, font, anchor="mb")
    for layer, heads in enumerate(guard_map.num_key_value_heads):
        y = top + layer * cell
        if layer % max(1, math.ceil(1.2 * TEXT_SIZE / cell)) == 0:
            pen.text((left - 6, y + cell / 2 - 1), str(layer), INK, font, anchor="rm")
        for head in range(heads):
            box = (left + head * cell, y, left + (head + 1) * cell - 2, y + cell - 2)
            score = score_of(guard_map, side, layer, head)
            pen.rectangle(box, NO_SCORE if score is None else colour(rank_of(score, ordered)))
            if head in getattr(guard_map, side).get(layer, {}):
                draw_frame(pen, box)


def draw_frame(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
    """The mark of a guarded head: red around white, to be seen on every colour."""
    pen.rectangle(box, outline=FRAME, width=2)
    left, top, right, bottom = box
    if right - left > 2 * SMALLEST_CELL:
        pen.rectangle((left + 2, top + 2, right - 2, bottom - 2), outline=INNER_FRAME)


def draw_legend(
    pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont, guard_map: GuardMap, corner: tuple[int, int]
) -> None:
    """What colours and frames say."""
    left, top = corner
    length, height = 160, 12
    if guard_map.scores is None:
        pen.rectangle((left, top, left + height, top + height), NO_SCORE)
        pen.text((left + height + 6, top - 1), "no scores recorded", INK, font)
    else:
        ordered = ordered_scores(guard_map) or [0.0]
        for x in range(length):
            pen.line((left + x, top, left + x, top + height), colour(x / (length - 1)))
        pen.text((left, top + height + 3), f"{ordered[0]:.2g}", INK, font)
        pen.text((left + length, top + height + 3), f"{ordered[-1]:.2g}", INK, font, anchor="ra")
        pen.text((left + length / 2, top + height + 3), "rank of score", INK, font, anchor="ma")
    bits = " or ".join(map(str, sorted({guard.bits for guard in guard_map}, reverse=True)))
    if bits:
        box = (left + length + 30, top - 2, left + length + 48, top + 16)
        pen.rectangle(box, NO_SCORE)
        draw_frame(pen, box)
        pen.text((left + length + 56, top), f"guarded: {bits} bits", INK, font)


def score_of(guard_map: GuardMap, side: str, layer: int, head: int) -> float | None:
    """None where there is none, or none that is finite."""
    rows = (guard_map.scores or {}).get(side) or (guard_map.scores or {}).get("key")
    return None if rows is None or not math.isfinite(rows[layer][head]) else rows[layer][head]


def ordered_scores(guard_map: GuardMap) -> list[float]:
    """All finite scores of the sides that are shown, smallest first."""
    sides = SIDES if values_differ(guard_map) else SIDES[:1]
    rows = [row for side in sides for row in (guard_map.scores or {}).get(side, [])]
    return sorted(x for row in rows for x in row if math.isfinite(x))


def colour(share: float) -> tuple[int, ...]:
    """Of a rank from 0 to 1: mixed from the two nearest of `COLOURS`."""
    place = share * (len(COLOURS) - 1)
    first = min(int(place), len(COLOURS) - 2)
    return tuple(round(a + (b - a) * (place - first)) for a, b in zip(COLOURS[first], COLOURS[first + 1]))


def rank_of(score: float, ordered: list[float]) -> float:
    """Where a score stands among all, from 0 to 1, the middle place for equal ones."""
    first, last = bisect_left(ordered, score), bisect_right(ordered, score) - 1
    return (first + last) / 2 / (len(ordered) - 1) if len(ordered) > 1 else 0.5
