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


APART = {"key_rank": 48, "value_rank": 80, "tokens": 150, "head_dim": 128}
HIDDEN = {"batch": 2, "starts": (130, 0), "mask": "bool", "tokens": 220}


@pytest.mark.parametrize("form", [{}, {"group": 4, **BFLOAT}], ids=["position query", "tile reconstruction"])
def test_ranks_and_codes_of_keys_and_values_apart(form, emulated):
    check(HopperCase(**APART, **form), emulated)
    other = {**APART, "key_rank": 112, "value_rank": 96, "value_code": ("symmetric", 4)}
    check(HopperCase(**other, **form, **CODES["8 bits asymmetric"]), emulated)


@pytest.mark.parametrize("form", [{}, {"group": 4, **BFLOAT}], ids=["position query", "tile reconstruction"])
def test_masks_and_starts(form, emulated):
    check(HopperCase(**HIDDEN, **form), emulated)
    check(HopperCase(starts=(190,), lengths=(180,), **form), emulated)  # nothing is to be seen


@pytest.mark.parametrize("norm", [None, "before", "after"])
def test_biases_and_norms_of_grouped_keys(norm, emulated):
    case = HopperCase(bias=True, norm=norm, group=7, key_rank=64, value_rank=16, tokens=70, head_dim=128)
    check(case, emulated)
    check(dataclasses.replace(case, **BFLOAT, value_rank=64, **CODES["8 bits symmetric"]), emulated)


@pytest.mark.parametrize(("groups", "heads", "chunk"), [(2, 2, 64), (3, 1, 32), (4, 4, 32)])
def test_groups_of_warps_take_tiles_and_heads_in_turn(groups, heads, chunk, emulated):
    tile = (("groups", groups), ("heads", heads), ("chunk", chunk), ("num_stages", groups))
    check(HopperCase(heads=4, group=2, tokens=450, split_tokens=512, tile=tile), emulated)


def every_tile() -> Iterator[HopperCase]:
    """Ways to divide the work of grouped queries, with all that may hide tokens."""
    hidden = {**RAGGED, "starts": (70, 0), "mask": "bool"}
    for groups, heads, chunk, stages in product((2, 3, 4), (1, 2, 4), (32, 64), (1, 8)):
        tile = (("groups", groups), ("heads", heads), ("chunk", chunk), ("num_stages", stages))
        yield HopperCase(heads=4, group=3, tile=tile, **hidden)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("case", every_tile(), ids=str)
def test_every_tile(case, code, emulated):
    check(dataclasses.replace(case, **BFLOAT, **CODES[code]), emulated)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("value_code", [None, ("float", 0), ("symmetric", 8), ("asymmetric", 4)])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("ranks", [(32, 32), (64, 96), (96, 128), (128, 64)])
def test_every_pair_of_forms(ranks, code, value_code, group, emulated):
    sizes = dict(zip(("key_rank", "value_rank"), ranks))
    case = HopperCase(group=group, value_code=value_code, **HIDDEN, **sizes, **BFLOAT, **CODES[code])
    check(case, emulated)
    if group > 1:
        check(dataclasses.replace(case, bias=True, norm="before"), emulated)


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
