"""Calibration: data, and the statistics that the fit needs."""

from .batches import CalibrationSet
from .collect import collect_statistics
from .data import calibration_info, default_calibration, validate_batches
from .load import load_calibration
from .statistics import Statistics, check_statistics_of, given_statistics, is_statistics
from .statistics_file import load_statistics, save_statistics


__all__ = [
    "CalibrationSet",
    "Statistics",
    "calibration_info",
    "check_statistics_of",
    "collect_statistics",
    "default_calibration",
    "given_statistics",
    "is_statistics",
    "load_calibration",
    "load_statistics",
    "save_statistics",
    "validate_batches",
]
