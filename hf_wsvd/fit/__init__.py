"""From weights and statistics to low-rank factors."""

from .factorise import factorise, spectrum
from .fit import Fit, fitted, refine
from .methods import METHODS
from .plan import Plan, planned


__all__ = ["METHODS", "Fit", "Plan", "factorise", "fitted", "planned", "refine", "spectrum"]
