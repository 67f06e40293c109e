"""The held-out evaluation set as a `datasets.Dataset`, and endless training batches.

`datasets` is imported only where a `Dataset` is built: training needs none.
"""

import io
from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from .questions import FORMS, QUESTION_TYPES, Form, ask, words
from .scenes import Scenes, Split, Styles, Tiles, load_tiles, render, sample_scenes, to_images


if TYPE_CHECKING:
    from datasets import Dataset


def evaluation_set(
    seed: int = 0, questions_per_type: int = 1000, styles: Styles = "seen", tile_size: int = 32
) -> "Dataset":
    """Questions about scenes that training cannot draw, the same for the same arguments.

    Features: image, question, answer, question_type, scene. Every type has `questions_per_type` rows, spread evenly
    over its directions and, where the answer is yes or no, over both answers. Types, directions and answers take
    turns, so that a leading part of the rows is balanced too.
    """
    return _to_dataset(evaluation_rows(seed, questions_per_type, styles, tile_size))


def calibration_set(seed: int = 0, questions_per_type: int = 32, tile_size: int = 32) -> "Dataset":
    """The same kinds of rows from the training split: for statistics that evaluation must not have seen."""
    return _to_dataset(evaluation_rows(seed, questions_per_type, "seen", tile_size, split="train"))


def _to_dataset(rows: dict[str, list[Any]]) -> "Dataset":
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    # A scene's questions share one encoded image; encoding them again would take most of the time.
    encoded = {id(image): image for image in rows["image"]}
    encoded = {key: {"bytes": _encode(image), "path": None} for key, image in encoded.items()}
    rows["image"] = [encoded[id(image)] for image in rows["image"]]
    texts = {name: Value("string") for name in ("question", "answer", "question_type")}
    return Dataset.from_dict(rows, features=Features({"image": ImageFeature(), **texts, "scene": Value("int32")}))


def evaluation_rows(
    seed: int = 0,
    questions_per_type: int = 1000,
    styles: Styles = "seen",
    tile_size: int = 32,
    split: Split = "evaluation",
) -> dict[str, list[Any]]:
    """The columns of `evaluation_set` with Pillow images, for where `datasets` is not installed."""
    generator = torch.Generator().manual_seed(seed)
    scenes = sample_scenes(2 * questions_per_type + 64, generator, split, styles)
    by_type = [_pick_questions(name, scenes, questions_per_type, generator) for name in QUESTION_TYPES]
    picked = [question for turn in zip(*by_type) for question in turn]

    used = sorted({scene for scene, _, _ in picked})
    tiles = load_tiles(tile_size)
    # A few dozen scenes at a time stay in the cache; all at once takes ten times as long.
    parts = (render(scenes[part], tiles) for part in torch.tensor(used).split(32))
    images = dict(zip(used, (image for part in parts for image in to_images(part))))
    texts = [form.text(slots) for _, form, slots in picked]
    return {
        "image": [images[scene] for scene, _, _ in picked],
        "question": [question for question, _ in texts],
        "answer": [answer for _, answer in texts],
        "question_type": [form.question_type for _, form, _ in picked],
        "scene": [scene for scene, _, _ in picked],
    }


def training_batches(batch_size: int, generator: torch.Generator, tiles: Tiles) -> Iterator[tuple[Scenes, Tensor]]:
    """Endless scenes of the training split and their pixels, uint8 [B, 3, H, W], on the generator's device."""
    while True:
        scenes = sample_scenes(batch_size, generator, "train")
        yield scenes, render(scenes, tiles)


def messages(question: str, image: Image.Image | None = None) -> list[dict[str, Any]]:
    """One user turn in the form that `processor.apply_chat_template` takes."""
    content: list[dict[str, Any]] = [{"type": "image", "image": image}] if image is not None else []
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


def _pick_questions(
    question_type: str, scenes: Scenes, count: int, generator: torch.Generator
) -> list[tuple[int, Form, list[int]]]:
    """`count` (scene, form, slots) of one type: equal shares, in turns, for every direction and for yes and no."""
    forms = [form for form in FORMS if form.question_type == question_type]
    answers = ("no", "yes") if question_type in ("relation", "exists") else (None,)
    shares = [(form, answer) for form in forms for answer in answers]
    picked = []
    for position, (form, answer) in enumerate(shares):
        slots, fits = (result[:, 0] for result in ask(form, scenes.names, 1, generator))
        if answer is not None:
            fits = fits & (slots[:, 2] == words().index(answer))
        # Each share starts at another scene, else all would fall on the first few.
        start = position * count // len(shares)
        candidates = torch.arange(len(scenes)).roll(-start)
        quota = (position + 1) * count // len(shares) - start
        chosen = candidates[fits[candidates]][:quota]
        if len(chosen) < quota:
            raise ValueError(f"only {len(chosen)} of {quota} scenes suit {form.question!r}: ask for more questions")
        picked.append([(scene, form, slots[scene].tolist()) for scene in chosen.tolist()])
    return [question for turn in zip_longest(*picked) for question in turn if question is not None]


def _encode(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
