"""Products of parameters, of which the quick tests run a share that has every value of every parameter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def crossed(quick: int, **parameters: Mapping[str, Any] | Sequence[str]) -> pytest.MarkDecorator:
    """Every combination of `parameters`, one in `quick` of them as a quick test and the others as slow ones.

    A combination is quick where the places of its values in their parameters add up to a multiple of `quick`. So each
    value is in quick tests as long as another parameter has at least `quick` values.

    Args:
        parameters: values by id, or values that are their own ids.
    """
    named = [
        list(values.items() if isinstance(values, Mapping) else zip(values, values)) for values in parameters.values()
    ]
    combinations = [
        pytest.param(
            *(value for _, (_, value) in places),
            id="-".join(str(name) for _, (name, _) in places),
            marks=pytest.mark.slow if sum(place for place, _ in places) % quick else (),
        )
        for places in itertools.product(*(list(enumerate(values)) for values in named))
    ]
    return pytest.mark.parametrize(list(parameters), combinations)
