"""From weights and statistics to low-rank factors."""

from .factorise import factorise, spectrum
from .fit import Fit, fitted, refine
from .full_rank import full_rank_heads, keep_full_rank
from .methods import METHODS
from .plan import Plan, planned


__all__ = [
    "METHODS",
    "Fit",
    "Plan",
    "factorise",
    "fitted",
    "full_rank_heads",
    "keep_full_rank",
    "planned",
    "refine",
    "spectrum",
]
