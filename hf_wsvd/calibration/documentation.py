"""Python's own documentation as text: on every machine, with no download, and never part of a question set here."""

import hashlib
import random
from pydoc_data.topics import topics
from typing import Literal


Half = Literal["calibration", "evaluation"]


def documentation_topics(half: Half) -> dict[str, str]:
    """Topic name -> text, for one of two halves that share no paragraph.

    Topics repeat one another (`compound` holds all of `for`, `while`, `with`), so a paragraph belongs to the largest
    topic that has it and is dropped from the others. The half of a topic is a bit of the SHA-256 of its name, which no
    seed, sample count or Python version changes.

    Raises ValueError for another name than the two halves.
    """
    if half not in ("calibration", "evaluation"):
        raise ValueError(f"half must be 'calibration' or 'evaluation', got {half!r}")
    wanted = 0 if half == "calibration" else 1
    seen: set[str] = set()
    kept = {}
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())  # the same paragraph is indented differently in different topics
            if words and words not in seen:
                seen.add(words)
                paragraphs.append(paragraph)
        if paragraphs and hashlib.sha256(name.encode()).digest()[0] % 2 == wanted:
            kept[name] = "\n\n".join(paragraphs).strip()
    return kept


def documentation_text(half: Half, seed: int | None = None) -> str:
    """One half as one text; topics in alphabetical order, or shuffled by `seed`."""
    kept = documentation_topics(half)
    names = sorted(kept)
    if seed is not None:
        random.Random(seed).shuffle(names)
    return "\n\n".join(kept[name] for name in names)
