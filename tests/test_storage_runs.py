"""Runs of a store hold, in the form that kernels take, what the store reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_wsvd.image_tokens import ImageTokens
from hf_wsvd.kernels.dequantize import read_tokens
from hf_wsvd.quantizer_config import StorageSpec
from hf_wsvd.storage import Store, make_store
from hf_wsvd.storage.runs import Run, evenly_spaced, paired


HEADS, WIDTH = 6, 16
INT4 = StorageSpec("minmax", 4)
INT2 = StorageSpec("hadamard", 2)
SPECS = {
    "whole": StorageSpec(),
    "int4": INT4,
    "grouped": StorageSpec("minmax", 8, group_size=4, symmetric=True),
    "hadamard": INT2,
    "turboquant": StorageSpec("turboquant", 3),
    "fp8": StorageSpec("fp8", 8),
    "windows": INT4._replace(sink_length=2, residual_length=3),
    "whole-heads": INT4._replace(whole_heads=(1, 4)),
    "guards": INT2._replace(guards=((INT4, (0, 1, 5)), (StorageSpec(), (3,)))),
    "narrow": INT4._replace(width=8, wide_heads=(2,)),
    "classes": INT2._replace(text=INT4),
    "guarded-classes": INT2._replace(text=StorageSpec(), guards=((INT4, (2, 3)),)),
}
# Two rows with an image of four tokens, in the same or in another place; text follows.
ALIKE = torch.zeros(2, 11, dtype=torch.bool)
ALIKE[:, 3:7] = True
DIFFERENT = ALIKE.clone()
DIFFERENT[1] = DIFFERENT[1].roll(2)


def filled(spec: StorageSpec, mask: Tensor = ALIKE, after: int = 3) -> Store:
    """A store of a prompt whose images `mask` marks, and of some text after it."""
    store = make_store(spec, "value", HEADS, WIDTH, torch.float32)
    tokens = torch.randn(2, HEADS, mask.shape[1] + after, WIDTH)
    tokens[:, [head for head in range(HEADS) if head not in spec.wide_heads], :, spec.width :] = 0
    store.append_marked(tokens[:, :, : mask.shape[1]], ImageTokens(mask))
    for token in tokens[:, :, mask.shape[1] :].split(1, dim=2):
        store.append_marked(token, ImageTokens())
    return store


def read(runs: list[Run], tokens: int) -> Tensor:
    """`[B, H, tokens, width]` as the runs have it; NaN where they have nothing."""
    out = torch.full((2, HEADS, tokens, WIDTH), torch.nan)
    for run in runs:
        numbers = read_tokens(run.stored, torch.float32)
        numbers = numbers if run.rotation is None else numbers @ run.rotation.T
        places = run.places
        if places is None:
            ((first, count),) = run.stretches
            places = torch.arange(first, first + count)[None]
        for row, slots in enumerate(places.expand(2, -1)):
            held = slots >= 0
            positions = slots[held].long()
            for number, head in enumerate(run.heads):
                assert out[row, head, positions].isnan().all()  # no token twice
                out[row, head, positions] = 0
                out[row, head, positions, : run.stored.width] = numbers[row, number, held]
    return out


@pytest.mark.parametrize("mask", [ALIKE, DIFFERENT], ids=["rows-alike", "rows-differ"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_runs_hold_what_the_store_reads(spec, mask):
    store = filled(spec, mask)
    assert store.obstacle() is None
    for _ in range(3):
        torch.testing.assert_close(read(store.runs(), len(store)), store.read(), rtol=0, atol=2e-6)
        later = [part for run in store.runs() for part in run.without_first(5)]
        torch.testing.assert_close(read(later, len(store) - 5), store.read()[:, :, 5:], rtol=0, atol=2e-6)
        store.crop(1)
        store.append_marked(torch.zeros(2, HEADS, 2, WIDTH), ImageTokens())
    store.keep_last(9)
    torch.testing.assert_close(read(store.runs(), 9), store.read(), rtol=0, atol=2e-6)
    store.select_batch([1, 0])
    torch.testing.assert_close(read(store.runs(), 9), store.read(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("key", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("value", ["int4", "guards", "classes", "windows"])
def test_pairs_have_the_same_heads_and_tokens_and_are_views(key, value):
    stores = filled(key), filled(SPECS[value])
    pairs = paired(*(store.runs() for store in stores))
    for side, store in enumerate(stores):
        runs = [pair[side] for pair in pairs]
        torch.testing.assert_close(read(runs, len(store)), store.read(), rtol=0, atol=2e-6)
        memory = {piece.tensor.untyped_storage().data_ptr() for piece in store.pieces()}
        assert {run.stored.payload.untyped_storage().data_ptr() for run in runs} <= memory
    for first, second in pairs:
        assert (first.heads, first.order, first.tokens) == (second.heads, second.order, second.tokens)


@pytest.mark.parametrize("value", ["classes", "guarded-classes"])
def test_rows_that_differ_are_paired_where_both_sides_tell_classes(value):
    key = filled(SPECS["guarded-classes"], DIFFERENT)
    assert paired(key.runs(), filled(SPECS["int4"], DIFFERENT).runs()) is None
    other = filled(SPECS[value], DIFFERENT)
    pairs = paired(key.runs(), other.runs())
    torch.testing.assert_close(read([pair[1] for pair in pairs], len(other)), other.read(), rtol=0, atol=2e-6)


def test_heads_fall_into_evenly_spaced_groups():
    numbers = [(0, 0), (1, 2), (2, 4), (3, 5), (4, 6), (5, 9)]
    assert evenly_spaced(numbers) == [numbers[:3], numbers[3:5], numbers[5:]]
    assert evenly_spaced([]) == []


def test_keys_of_kivi_are_no_runs():
    store = make_store(StorageSpec("kivi", 4, group_size=4, residual_length=4), "key", HEADS, WIDTH, torch.float32)
    assert store.obstacle() == "scheme kivi: keys are coded over groups of tokens"
    with pytest.raises(NotImplementedError, match="scheme kivi"):
        store.runs()
