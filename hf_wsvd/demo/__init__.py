"""The demo's world: emoji-grid scenes, questions about them and the held-out evaluation set."""

from .dataset import calibration_set, evaluation_rows, evaluation_set, messages
from .questions import QUESTION_TYPES
from .scenes import Scenes, Tiles, load_tiles, render, sample_scenes, to_images


__all__ = [
    "QUESTION_TYPES",
    "Scenes",
    "Tiles",
    "calibration_set",
    "evaluation_rows",
    "evaluation_set",
    "load_tiles",
    "messages",
    "render",
    "sample_scenes",
    "to_images",
]
