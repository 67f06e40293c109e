"""The Hopper kernels, emulated on the CPU, against the definition of a part's splits in fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product

import hopper_cases
import pytest
from hopper_cases import HopperCase


pytest.importorskip("triton", minversion="3.6")

CODES = {
    "16 bits": {},
    "8 bits symmetric": {"code": "symmetric", "bits": 8},
    "8 bits asymmetric": {"code": "asymmetric", "bits": 8},
    "4 bits symmetric": {"code": "symmetric", "bits": 4},
    "4 bits asymmetric": {"code": "asymmetric", "bits": 4},
}
BFLOAT = {"dtype": "bfloat16"}
WIDE = {"key_rank": 64, "value_rank": 64}
GROUP = {"group": 4, **WIDE, **BFLOAT}
RAGGED = {"batch": 2, "tokens": 301, "split_tokens": 128, "lengths": (301, 97)}


def check(case: HopperCase, emulated: Callable) -> None:
    error, logarithm = emulated(hopper_cases.worst_error, case)
    assert error < case.tolerance
    assert logarithm < 4 * case.tolerance  # absolute


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("form", [{}, GROUP], ids=["position query", "tile reconstruction"])
def test_every_code(code, form, emulated):
    check(HopperCase(**form, **CODES[code]), emulated)


@pytest.mark.parametrize("form", [{}, GROUP], ids=["position query", "tile reconstruction"])
def test_some_heads_of_a_ragged_batch_with_splits_that_see_nothing(form, emulated):
    check(HopperCase(heads=3, part=(2, 0), first=16, **RAGGED, **form, **CODES["4 bits asymmetric"]), emulated)


@pytest.mark.parametrize("form", [{}, GROUP], ids=["position query", "tile reconstruction"])
def test_more_tiles_than_stages(form, emulated):
    check(HopperCase(tokens=650, split_tokens=768, **form), emulated)


def test_queries_that_pick_single_tokens(emulated):
    check(HopperCase(peak=8, row_batch=2, batch=2, **CODES["8 bits asymmetric"]), emulated)


def every_form() -> Iterator[HopperCase]:
    """All that is served: weights times scales can be too small for groups in float16."""
    forms = [{"heads": 1}, {}, WIDE, {"group": 4, **WIDE}, {"group": 7, **WIDE}]
    for form, dtype, head_dim, code in product(forms, ("float16", "bfloat16"), (64, 128), CODES.values()):
        if "group" not in form or dtype == "bfloat16" or not code:
            yield HopperCase(dtype=dtype, head_dim=head_dim, **form, **code)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 511])
@pytest.mark.parametrize("case", every_form(), ids=str)
def test_every_form_and_length(case, tokens, emulated):
    check(dataclasses.replace(case, tokens=tokens), emulated)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("form", [{}, WIDE, GROUP, {**GROUP, "group": 16}], ids=str)
@pytest.mark.parametrize("peak", [1.0, 8.0])
def test_long_ragged_batches(peak, form, code, emulated):
    lengths = {"batch": 3, "tokens": 1500, "split_tokens": 384, "lengths": (1500, 0, 769)}
    check(HopperCase(peak=peak, row_batch=3, heads=3, part=(1, 2), **lengths, **form, **CODES[code]), emulated)
