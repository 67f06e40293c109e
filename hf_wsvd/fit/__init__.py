"""From weights and statistics to low-rank factors."""

from .factorise import factorise, spectrum
from .fit import Fit, fitted
from .methods import METHODS


__all__ = ["METHODS", "Fit", "factorise", "fitted", "spectrum"]
