"""Calibration: data, and the statistics that the fit needs."""

from .data import calibration_info, default_calibration, validate_batches
from .gram import Statistics, collect_statistics


__all__ = ["Statistics", "calibration_info", "collect_statistics", "default_calibration", "validate_batches"]
