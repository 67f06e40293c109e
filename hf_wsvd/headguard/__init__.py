"""HeadGuard (arXiv 2609.35800): the choice of the physical KV heads that keep more precision than the rest."""

from .measures import HeadMeasures
from .scores_file import heads_from_scores, load_head_scores, save_head_scores
from .select import measure_heads, select_heads


__all__ = [
    "HeadMeasures",
    "heads_from_scores",
    "load_head_scores",
    "measure_heads",
    "save_head_scores",
    "select_heads",
]
