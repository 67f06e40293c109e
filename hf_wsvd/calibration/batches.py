"""What a calibration set is: model-input dicts, and what is known of where they came from."""

from collections.abc import Iterable
from typing import Any

import torch


Batch = dict[str, torch.Tensor]

# Columns of one entry a token that say what to look at, and that no model is given.
BESIDE_INPUTS = ("labels", "evidence_mask")

IGNORED = -100  # the label of a token that is no answer; transformers' losses leave it out


class CalibrationSet(list[Batch]):
    """A list of model-input dicts that knows its origin.

    Attributes:
        source: what a checkpoint records besides the contents, JSON-safe: `dataset` (a Hub id, or the bare name of a
            local file or folder), `split`, `preset`, `seed`, as far as they are known.
    """

    def __init__(self, batches: Iterable[Batch] = (), source: dict[str, Any] | None = None):
        super().__init__(batches)
        self.source = dict(source or {})


def recorded_source(batches: Any) -> dict[str, Any]:
    """`source` of a `CalibrationSet`; empty for any other form of calibration data."""
    return dict(batches.source) if isinstance(batches, CalibrationSet) else {}
