"""Calibration: data, and the statistics that the fit needs."""

from .batches import CalibrationSet
from .data import calibration_info, default_calibration, validate_batches
from .gram import Statistics, collect_statistics
from .load import load_calibration


__all__ = [
    "CalibrationSet",
    "Statistics",
    "calibration_info",
    "collect_statistics",
    "default_calibration",
    "load_calibration",
    "validate_batches",
]
