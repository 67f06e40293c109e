"""Stores of two token classes and of guarded heads: every row reads as if its classes and heads were alone.

The oracle of a row is a store of batch 1 for each class, which sees that row's tokens of the class and nothing else.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage_properties import HEADS, LIMITS, WIDTH, held, poison, tokens_of

from hf_wsvd.image_tokens import TEXT_ONLY, ImageTokens
from hf_wsvd.quantizer_config import StorageSpec
from hf_wsvd.storage import make_store
from hf_wsvd.storage.token_classes import TokenClassStore


WHOLE = StorageSpec()
MINMAX, HADAMARD = StorageSpec("minmax", 2), StorageSpec("hadamard", 3)
EIGHT = StorageSpec("minmax", 8, symmetric=True)
KIVI = StorageSpec("kivi", 4, group_size=4, residual_length=8)

# Rows of these do not depend on each other.
TOKEN_WISE = {
    "minmax": MINMAX._replace(text=WHOLE),
    "text-packed": MINMAX._replace(text=EIGHT),
    "image-whole": WHOLE._replace(text=MINMAX),
    "bf16-fp16": StorageSpec("bf16", 16, text=StorageSpec("fp16", 16)),
    "guards": MINMAX._replace(text=WHOLE, guards=((WHOLE, (1,)),)),
    "guards-of-two-kinds": HADAMARD._replace(text=WHOLE, guards=((WHOLE, (2,)), (EIGHT, (0,)))),
    "all-guarded": MINMAX._replace(text=WHOLE, guards=((WHOLE, (0, 1, 2)),)),
    "whole-heads-and-guards": MINMAX._replace(text=EIGHT, whole_heads=(0,), guards=((EIGHT, (0, 2)),)),
    "grouped": StorageSpec("minmax", 3, 12, text=HADAMARD),
    "turboquant": StorageSpec("turboquant", 3, text=WHOLE),
}
# These have windows, groups of tokens or a scale for all rows: rows are alike in their tests.
TOGETHER = {
    "fp8": StorageSpec("fp8", 8, text=WHOLE),
    "windows": MINMAX._replace(sink_length=2, residual_length=3, text=WHOLE),
    "kivi": KIVI._replace(text=WHOLE),
    "kivi-guards": KIVI._replace(bits=2, text=EIGHT, guards=((WHOLE, (2,)),)),
}
CASES = {**TOKEN_WISE, **TOGETHER}


class Row:
    """One sequence: its tokens by class, in stores of their own, and the class of every position."""

    def __init__(self, spec, side, heads, dtype):
        self.kinds: list[bool] = []
        image = spec._replace(text=None)
        self.stores = {
            True: make_store(image, side, heads, WIDTH, dtype),
            False: make_store(spec.text._replace(whole_heads=spec.whole_heads), side, heads, WIDTH, dtype),
        }

    def append(self, tokens, kinds):
        self.kinds += kinds
        for kind, store in self.stores.items():
            own = [place for place, found in enumerate(kinds) if found == kind]
            if own:
                store.append(tokens[:, :, own])

    def crop(self, count):
        cut = len(self.kinds) - count
        for kind, store in self.stores.items():
            store.crop(self.kinds[cut:].count(kind))
        del self.kinds[cut:]

    def keep_last(self, count):
        del self.kinds[: len(self.kinds) - count]
        for kind, store in self.stores.items():
            store.keep_last(self.kinds.count(kind))

    def read(self):
        parts = {kind: list(store.read().unbind(2)) for kind, store in self.stores.items() if len(store)}
        return torch.stack([parts[kind].pop(0) for kind in self.kinds], dim=2)


class Oracle:
    """Rows that know nothing of each other, or (`together`) one for a batch whose rows are alike."""

    def __init__(self, spec, side, dtype, together):
        self.new = lambda: Row(spec, side, HEADS, dtype)
        self.together, self.rows, self.batch = together, [], 0

    def __len__(self):
        return len(self.rows[0].kinds) if self.rows else 0

    def append(self, tokens, kinds):
        if not len(self):
            self.batch = len(tokens)
            self.rows = [self.new() for _ in (kinds[:1] if self.together else kinds)]
        for number, row in enumerate(self.rows):
            row.append(tokens if self.together else tokens[number : number + 1], list(kinds[number]))

    def change(self, operation, count):
        for row in self.rows:
            getattr(row, operation)(count)
        if not len(self):
            self.rows, self.batch = [], 0

    def select(self, index):
        self.batch = len(index)
        if self.together:
            for store in self.rows[0].stores.values():
                store.select_batch(index)
        else:
            self.rows = [copy.deepcopy(self.rows[number]) for number in index]

    def read(self):
        return torch.cat([row.read() for row in self.rows])


def check(store, oracle, spec):
    assert len(store) == len(oracle)
    assert store.batch == oracle.batch
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(store)}
    assert store.nbytes == sum(storages.values())
    poison(store)
    if not len(oracle):
        return
    found, wanted = store.read(), oracle.read()
    assert found.dtype == wanted.dtype
    into = torch.empty_like(found)
    store.read_into(into)
    schemes = {part.scheme for part in (spec, spec.text, *(guard for guard, _ in spec.guards))}
    for read in (found, into):
        if schemes & {"hadamard", "turboquant"}:
            unit = torch.finfo(wanted.dtype).eps * wanted.abs().amax().float()
            assert (read.float() - wanted.float()).abs().amax() <= 8 * unit
        else:
            assert torch.equal(read, wanted)


def kinds_of(draw, batch, count, alike):
    """Classes of the tokens of a call: no image, images in the same places, or in other places in every row."""
    form = draw(st.sampled_from(["text", "alike", "alike"] if alike else ["text", "alike", "mixed", "mixed"]))
    if form == "text":
        return [[False] * count] * batch
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    return [draw(flags)] * batch if form == "alike" else [draw(flags) for _ in range(batch)]


def sequence(side, spec, together, data):
    """One random sequence of operations on a store and its oracle."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    store, oracle = make_store(spec, side, HEADS, WIDTH, dtype), Oracle(spec, side, dtype, together)
    operations = ["append"] * 5 + ["crop", "crop", "keep_last", "keep_last", "select", "slice", "repeat"]
    operations += ["copy", "state", "reset", "move"]
    for operation in ["append", *draw(st.lists(st.sampled_from(operations), min_size=1, max_size=14))]:
        length = len(oracle)
        if operation == "append":
            tokens = tokens_of(draw, oracle.batch if length else draw(st.integers(1, 3)), dtype)
            kinds = kinds_of(draw, tokens.shape[0], tokens.shape[2], together)
            text_only = not any(map(any, kinds))
            store.append_marked(tokens, TEXT_ONLY if text_only else ImageTokens(torch.tensor(kinds)))
            oracle.append(tokens, kinds)
        elif operation in ("crop", "keep_last"):
            count = draw(st.integers(0, length))
            getattr(store, operation)(count)
            oracle.change(operation, count)
        elif operation == "reset":
            store.reset()
            oracle.change("crop", length)
        elif operation == "move":
            store.to(torch.device("cpu"))
        elif operation == "copy":
            other, store = store, copy.deepcopy(store)
            other.crop(draw(st.integers(0, length)))
        elif operation == "state":
            state = store.state()
            store = make_store(spec, side, HEADS, WIDTH, dtype)
            store.load_state(state)
        elif length:
            rows = list(range(oracle.batch))
            if operation == "repeat":
                repeats = draw(st.integers(1, 2)) if oracle.batch < 4 else 1
                store.repeat_batch(repeats)
                oracle.select([row for row in rows for _ in range(repeats)])
            elif operation == "slice":
                start = draw(st.integers(0, oracle.batch - 1))
                store.select_batch(slice(start, oracle.batch))
                oracle.select(rows[start:])
            else:
                index = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4))
                store.select_batch(torch.tensor(index))
                oracle.select(index)
        check(store, oracle, spec)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6, derandomize=True, **LIMITS)
@given(data=st.data())
def test_any_sequence_of_operations(case, data):
    with torch.no_grad():
        sequence(data.draw(st.sampled_from(["key", "value"])), CASES[case], case in TOGETHER, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=150, derandomize=True, **LIMITS)
@given(data=st.data())
def test_many_sequences_of_operations(case, data):
    with torch.no_grad():
        sequence(data.draw(st.sampled_from(["key", "value"])), CASES[case], case in TOGETHER, data)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("base", [MINMAX, HADAMARD, StorageSpec("fp8", 8), KIVI], ids=lambda spec: spec.scheme)
def test_guarded_heads_read_as_if_they_were_alone(base, side):
    """Every head by the spec that is its own, numbered as in the layer."""
    spec = base._replace(whole_heads=(1,), guards=((WHOLE, (3,)), (EIGHT, (0, 1))))
    own = {0: EIGHT, 1: WHOLE, 2: base, 3: WHOLE, 4: base}
    store, tokens = make_store(spec, side, 5, WIDTH, torch.float32), torch.randn(2, 5, 21, WIDTH)
    alone = {head: make_store(part, side, 1, WIDTH, torch.float32) for head, part in own.items()}
    for piece in tokens.split([12, 1, 8], dim=2):
        store.append(piece)
        for head, part in alone.items():
            part.append(piece[:, head : head + 1])
    for head, part in alone.items():
        torch.testing.assert_close(store.read()[:, head : head + 1], part.read(), rtol=0, atol=2e-6)
    assert torch.equal(store.read()[:, [1, 3]], tokens[:, [1, 3]])


def test_a_guard_in_the_form_of_the_rest_is_no_store_of_its_own():
    plain = make_store(MINMAX, "key", 3, WIDTH, torch.float32)
    same = make_store(MINMAX._replace(guards=((MINMAX, (1,)),)), "key", 3, WIDTH, torch.float32)
    assert type(same) is type(plain)


def test_a_guard_map_of_more_heads_is_refused():
    with pytest.raises(ValueError, match="guard_map has head 3 where the layer has 3 KV heads"):
        make_store(MINMAX._replace(guards=((WHOLE, (3,)),)), "key", 3, WIDTH, torch.float32)


def mixed_store():
    """A store of two rows whose images stand in different places, and its tokens."""
    store, tokens = (
        make_store(TOKEN_WISE["minmax"], "key", HEADS, WIDTH, torch.float32),
        torch.randn(2, HEADS, 6, WIDTH),
    )
    mask = torch.tensor([[False, True, True, False, False, False], [False, False, False, False, True, False]])
    store.append_marked(tokens, ImageTokens(mask))
    return store, tokens


def test_unmarked_tokens_are_refused():
    with pytest.raises(ValueError, match="was not told which tokens these are"):
        mixed_store()[0].append(torch.zeros(2, HEADS, 1, WIDTH))


def test_rows_share_slots_and_a_map_says_where():
    """As many slots as the row with the most tokens of a class needs; the others of a row are never read."""
    store, tokens = mixed_store()
    assert isinstance(store, TokenClassStore)
    assert (len(store.image), len(store.text)) == (2, 5)
    places = store.state()["places"]
    assert places.tolist() == [[-1, 0, 1, -2, -3, -4], [-1, -2, -3, -4, 0, -5]]
    assert places.dtype == torch.int32
    assert torch.equal(store.read()[1, :, [0, 1, 2, 3, 5]], tokens[1, :, [0, 1, 2, 3, 5]])
    kinds = {piece.kind for piece in store.pieces()}
    assert kinds == {"payload", "scales", "places"}


def test_rows_alike_need_no_map():
    store = make_store(TOKEN_WISE["minmax"], "key", HEADS, WIDTH, torch.float32)
    mask = torch.tensor([[False, True, True, False]]).expand(3, -1)
    store.append_marked(torch.randn(3, HEADS, 4, WIDTH), ImageTokens(mask))
    assert "places" not in {piece.kind for piece in store.pieces()}


def test_a_long_prompt_beyond_a_window_is_freed():
    """What a sliding window drops of a batch with a map is freed when it is the greater part."""
    store = make_store(TOKEN_WISE["minmax"], "key", HEADS, WIDTH, torch.float32)
    mask = torch.rand(2, 200) < 0.5
    tokens = torch.randn(2, HEADS, 200, WIDTH)
    store.append_marked(tokens, ImageTokens(mask))
    wanted, before = store.read()[:, :, -20:], store.nbytes
    store.keep_last(20)
    assert torch.equal(store.read(), wanted)
    assert store.nbytes < before / 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": None}, "segments are missing"),
        ({"segments": torch.tensor([[6, 2, 5]], dtype=torch.int32)}, "segments are"),
        ({"segments": torch.tensor([[6, 2, 4]])}, "do not fit"),
        ({"segments": torch.tensor([[-6, 2, 5]])}, "a segment of -6 tokens"),
        ({"segments": torch.tensor([[8, 2, 5]])}, "a segment of 8 tokens"),
        ({"places": None}, "places are missing"),
        ({"places": torch.zeros(2, 6)}, "wanted \\[2, 6\\] torch.int32"),
        ({"places": torch.zeros(2, 5, dtype=torch.int32)}, "wanted \\[2, 6\\] torch.int32"),
        ({"places": torch.full((2, 6), 7, dtype=torch.int32)}, "slots that are not there"),
        ({"places": torch.full((2, 6), -(2**31), dtype=torch.int32)}, "slots that are not there"),
        ({"places": torch.zeros(2, 6, dtype=torch.int32)}, "to one slot twice"),
        ({"image.payload": None}, "belong"),
        ({"other": torch.zeros(1)}, "other"),
    ],
)
def test_a_wrong_state_is_refused(change, message):
    state = {**mixed_store()[0].state(), **change}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        make_store(TOKEN_WISE["minmax"], "key", HEADS, WIDTH, torch.float32).load_state(state)


def test_gradients_reach_tokens_that_are_kept_whole():
    spec = MINMAX._replace(text=WHOLE, guards=((WHOLE, (1,)),))
    store, tokens = make_store(spec, "key", HEADS, WIDTH, torch.float32), torch.randn(1, HEADS, 4, WIDTH)
    tokens.requires_grad_()
    store.append_marked(tokens, ImageTokens(torch.tensor([[False, True, True, False]])))
    store.read().sum().backward()
    wanted = torch.zeros_like(tokens)
    wanted[:, :, [0, 3]] = 1
    wanted[:, 1] = 1
    assert torch.equal(tokens.grad, wanted)
