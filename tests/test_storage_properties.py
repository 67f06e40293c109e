"""Stores against a list of tokens: whatever is done to them, what is left reads as it did, and nothing else is held.

Readings equal those of the model bit for bit, but for the rotated schemes: the matmul that turns them back may round
differently with the number of tokens (their codes are compared bit for bit in `test_storage_codecs`).
"""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_wsvd.kernels.packing import packed_width
from hf_wsvd.quantizer_config import StorageSpec
from hf_wsvd.storage import make_store
from hf_wsvd.storage.build import codec_for
from hf_wsvd.storage.token_buffer import TokenBuffer


HEADS, WIDTH = 3, 24
ROTATED = ("hadamard", "turboquant")
WINDOWS = {"sink_length": 3, "residual_length": 5}
KIVI = StorageSpec("kivi", 4, group_size=4, residual_length=8)

# (side, spec) by name.
CASES = {
    "whole": ("key", StorageSpec()),
    "bf16": ("key", StorageSpec("bf16", 16)),
    "bf16-windows": ("value", StorageSpec("bf16", 16, **WINDOWS)),
    "fp16": ("value", StorageSpec("fp16", 16)),
    "fp8": ("key", StorageSpec("fp8", 8)),
    "fp8-windows": ("value", StorageSpec("fp8", 8, **WINDOWS)),
    "fp8-whole-heads": ("key", StorageSpec("fp8", 8, residual_length=2, whole_heads=(1,))),
    "minmax-8": ("key", StorageSpec("minmax", 8)),
    "minmax-8-symmetric": ("value", StorageSpec("minmax", 8, symmetric=True)),
    "minmax-4": ("key", StorageSpec("minmax", 4)),
    "minmax-4-symmetric-grouped": ("value", StorageSpec("minmax", 4, 8, True)),
    "minmax-4-windows": ("key", StorageSpec("minmax", 4, **WINDOWS)),
    "minmax-3-grouped": ("key", StorageSpec("minmax", 3, 12)),
    "minmax-3-symmetric-sink": ("value", StorageSpec("minmax", 3, None, True, sink_length=4)),
    "minmax-2": ("value", StorageSpec("minmax", 2)),
    "minmax-2-symmetric": ("value", StorageSpec("minmax", 2, None, True)),
    "minmax-2-grouped-whole-heads-windows": ("key", StorageSpec("minmax", 2, 8, whole_heads=(0, 2), **WINDOWS)),
    "hadamard-4": ("key", StorageSpec("hadamard", 4)),
    "hadamard-4-whole-heads": ("key", StorageSpec("hadamard", 4, whole_heads=(2,))),
    "hadamard-2-windows": ("value", StorageSpec("hadamard", 2, **WINDOWS)),
    "turboquant-4": ("key", StorageSpec("turboquant", 4)),
    "turboquant-3-residual": ("key", StorageSpec("turboquant", 3, residual_length=6)),
    "turboquant-2-windows": ("value", StorageSpec("turboquant", 2, **WINDOWS)),
    "kivi-4-key": ("key", KIVI),
    "kivi-4-value": ("value", KIVI),
    "kivi-2-key": ("key", KIVI._replace(bits=2, residual_length=4)),
    "kivi-2-value": ("value", KIVI._replace(bits=2)),
    "kivi-4-key-sink": ("key", KIVI._replace(sink_length=3)),
    "kivi-2-key-whole-heads": ("key", KIVI._replace(bits=2, whole_heads=(0,))),
    "kivi-2-value-windows-whole-heads": ("value", KIVI._replace(bits=2, sink_length=2, whole_heads=(0,))),
}


@dataclass
class Token:
    """One token of one row of the batch: `[HEADS, WIDTH]` as it came and as it reads."""

    raw: torch.Tensor
    reads: torch.Tensor
    sink: bool = False
    packed: bool = False
    place: int = -1  # in its KIVI group


class Model:
    """What a store is expected to do: rows of tokens."""

    def __init__(self, side: str, spec: StorageSpec, dtype: torch.dtype):
        self.spec, self.dtype = spec, dtype
        self.kivi_key = spec.scheme == "kivi" and side == "key"
        self.codec = None if spec.scheme is None or self.kivi_key else codec_for(spec, WIDTH)
        self.rows: list[list[Token]] = []
        self.scale = None  # of fp8

    def __len__(self):
        return len(self.rows[0]) if self.rows else 0

    def append(self, tokens):
        if not len(self):
            self.rows = [[] for _ in tokens]
        for row, new in zip(self.rows, tokens.transpose(1, 2)):
            for raw in new:
                sink = len(row) < self.spec.sink_length and all(token.sink for token in row)
                row.append(Token(raw, raw, sink))
        if self.spec.scheme is not None:
            self.pack()

    def pack(self):
        """Pack what leaves the window."""
        waiting = [[token for token in row if not (token.sink or token.packed)] for row in self.rows]
        count, residual = len(waiting[0]), self.spec.residual_length
        leaving = count - count % residual if self.kivi_key else max(count - residual, 0)
        if leaving and self.spec.scheme == "fp8" and not any(token.packed for token in self.rows[0]):
            first = torch.stack([token.raw for row in waiting for token in row[:leaving]]).float()
            self.scale = first.abs().amax(dim=(0, 2))[None, :, None, None] / 224
        for row in waiting:
            for start in range(0, leaving, self.spec.group_size) if self.kivi_key else ():
                self.pack_group(row[start : start + self.spec.group_size])
            for token in row[: 0 if self.kivi_key else leaving]:
                self.pack_token(token)

    def pack_token(self, token):
        self.codec.to(torch.device("cpu"))
        if self.spec.scheme == "fp8":
            self.codec.state["scale"] = self.scale
        alone = self.codec.decode(self.codec.encode(token.raw[None, :, None]), self.dtype)[0, :, 0]
        self.set(token, alone)

    def pack_group(self, tokens):
        """Every channel by its range over the group (KIVI, section 3.3)."""
        group = torch.stack([token.raw for token in tokens]).float()
        low, top = group.amin(0), 2**self.spec.bits - 1
        scale, zero = ((group.amax(0) - low) / top).half().float(), low.half().float()
        codes = ((group - zero) / scale).round().clamp(0, top)
        for place, (token, code) in enumerate(zip(tokens, codes)):
            token.place = place
            self.set(token, code.to(self.dtype) * scale.to(self.dtype) + zero.to(self.dtype))

    def set(self, token, reads):
        token.packed, token.reads = True, reads
        for head in self.spec.whole_heads:
            token.reads[head] = token.raw[head]

    def crop(self, count):
        for row in self.rows:
            del row[max(len(row) - count, 0) :]
            cut = [token for token in row if token.packed and self.kivi_key]
            if cut and cut[-1].place < self.spec.group_size - 1:  # the rest of its group goes back
                for token in cut[-cut[-1].place - 1 :]:
                    if token.place <= cut[-1].place:
                        token.raw, token.packed = token.reads, False

    def keep_last(self, count):
        for row in self.rows:
            del row[: max(len(row) - count, 0)]

    def select(self, index):
        self.rows = [copy.deepcopy(self.rows[number]) for number in index]

    def read(self):
        return torch.stack([torch.stack([token.reads for token in row], dim=1) for row in self.rows])

    def lengths(self):
        """Tokens in the sink, packed, and in the window."""
        row = self.rows[0] if self.rows else []
        sink = sum(token.sink for token in row)
        packed = sum(token.packed for token in row)
        return sink, packed, len(row) - sink - packed


class Finder(pickle.Pickler):
    """Every object of a kind that another one holds, found without knowing how it is built."""

    def __init__(self, kind):
        super().__init__(io.BytesIO())
        self.kind, self.found = kind, []

    def persistent_id(self, value):
        if isinstance(value, self.kind):
            self.found.append(value)
        return "tensor" if isinstance(value, torch.Tensor) else None


def held(value, kind=torch.Tensor):
    finder = Finder(kind)
    finder.dump(value)
    return finder.found


def poison(store):
    """Make the unused memory of the buffers something that would show."""
    for buffer in held(store, TokenBuffer):
        if buffer.data is not None:
            for unused in (buffer.data[..., : buffer.start, :], buffer.data[..., buffer.end :, :]):
                unused.fill_(torch.nan if unused.is_floating_point() else 255)


def check(store, model, side):
    assert len(store) == len(model)
    assert store.batch == (len(model.rows) if len(model) else 0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(store)}
    assert store.nbytes == sum(storages.values())
    poison(store)
    check_packed(store.packed(), model, side)
    if not len(model):
        return
    found, wanted = store.read(), model.read()
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if model.spec.scheme in ROTATED:
        unit = torch.finfo(model.dtype).eps * wanted.abs().amax().float()
        assert (found.float() - wanted.float()).abs().amax() <= 8 * unit
    else:
        assert torch.equal(found, wanted)
    for heads in (slice(0, 1), slice(1, HEADS)):
        torch.testing.assert_close(store.read_heads(heads), found[:, heads], equal_nan=True)


def check_packed(packed, model, side):
    """Names and shapes of what kernels get: no more tokens than there are, and every part that has some."""
    spec, (sink, middle, recent) = model.spec, model.lengths()
    if spec.scheme is None:
        sink, middle, recent = 0, 0, len(model)
    numbers = {"bf16": 0, "fp16": 0, "fp8": 0, "turboquant": 1}.get(spec.scheme, 1 if spec.symmetric else 2)
    # KIVI's channels of a value make groups of 4, as its tokens of a key do.
    groups = WIDTH // spec.group_size if spec.group_size else 1
    bytes_ = WIDTH if spec.scheme in ("bf16", "fp16") else packed_width(WIDTH, 8 if spec.bits == 16 else spec.bits)
    seen = dict.fromkeys(("whole", "sink", "payload", "scales", "recent", "scale"), 0)
    for name, tensor in packed.items():
        parts = name.split(".")
        kind = next(part for part in reversed(parts) if part != "tokens") if parts != ["tokens"] else "recent"
        heads = {"whole": len(spec.whole_heads)}.get(parts[0], HEADS - len(spec.whole_heads))
        if kind == "scale":
            wanted = (1, heads, 1, 1)
        elif kind in ("payload", "scales") and model.kivi_key:
            group = spec.group_size
            hidden = -middle % group  # tokens of the first group that `keep_last` dropped
            tokens = middle + hidden if kind == "payload" else (middle + hidden) // group
            wanted = (len(model.rows), heads, tokens, bytes_ if kind == "payload" else 2 * WIDTH)
        else:
            tokens = {"whole": len(model), "sink": sink, "recent": recent}.get(kind, middle)
            width = {"payload": bytes_, "scales": numbers * groups}.get(kind, WIDTH)
            wanted = (len(model.rows), heads, tokens, width)
        assert tuple(tensor.shape) == wanted, name
        seen[kind] += 1
    assert seen == {
        "whole": int(bool(spec.whole_heads) and len(model) > 0),
        "sink": int(sink > 0),
        "payload": int(middle > 0),
        "scales": int(middle > 0 and numbers > 0),
        "recent": int(recent > 0),
        "scale": int(middle > 0 and spec.scheme == "fp8"),
    }


def fresh(side, spec, dtype):
    return make_store(spec, side, HEADS, WIDTH, dtype)


def tokens_of(draw, batch, dtype):
    """A prompt or a few tokens, some with an outlier channel."""
    count = draw(st.one_of(st.just(1), st.integers(1, 4), st.integers(5, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tokens = torch.randn(batch, HEADS, count, WIDTH, generator=generator)
    tokens[..., draw(st.integers(0, WIDTH - 1))] *= draw(st.sampled_from([1.0, 20.0]))
    return tokens.to(dtype)


OPERATIONS = (
    ("append",) * 6 + ("crop", "crop", "keep_last", "reorder", "select", "mask", "slice", "repeat", "move") + (
        "copy", "state", "reset")
)  # fmt: skip


def sequence(side, spec, data):
    """One random sequence of operations on a store and on the model."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    store, model = fresh(side, spec, dtype), Model(side, spec, dtype)
    snapshot = None
    for operation in ["append", *draw(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=14))]:
        batch, length = len(model.rows), len(model)
        if operation == "append":
            tokens = tokens_of(draw, batch if length else draw(st.integers(1, 3)), dtype)
            store.append(tokens)
            model.append(tokens)
        elif operation in ("crop", "keep_last"):
            count = draw(st.integers(0, length))
            getattr(store, operation)(count)
            getattr(model, operation)(count)
        elif operation == "reset":
            store.reset()
            model = Model(side, spec, dtype)
        elif operation == "move":
            store.to(torch.device("cpu"))
        elif operation == "copy":
            other, store = store, copy.deepcopy(store)
            if length:
                other.crop(draw(st.integers(0, length)))
                other.append(tokens_of(draw, batch if len(other) else 1, dtype))
        elif operation == "state":
            snapshot = store.state()
            before = copy.deepcopy(snapshot)
            store = fresh(side, spec, dtype)
            store.load_state(snapshot)
            snapshot = snapshot, before
        elif length:
            rows = list(range(batch))
            if operation == "repeat":
                repeats = draw(st.integers(1, 2)) if batch < 4 else 1
                store.repeat_batch(repeats)
                model.select([row for row in rows for _ in range(repeats)])
            else:
                index = rows
                if operation == "reorder":
                    index = chosen = draw(st.permutations(rows))
                elif operation == "select":
                    index = chosen = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4))
                elif operation == "mask":
                    index = draw(st.lists(st.booleans(), min_size=batch, max_size=batch).filter(any))
                    chosen = [row for row in rows if index[row]]
                else:
                    start = draw(st.integers(0, batch - 1))
                    index, chosen = slice(start, batch), rows[start:]
                as_tensor = not isinstance(index, slice) and (operation != "select" or draw(st.booleans()))
                store.select_batch(torch.tensor(index) if as_tensor else index)
                model.select(chosen)
        check(store, model, side)
    if snapshot is not None:  # later operations have not reached into what was saved
        assert all(torch.equal(bits(a), bits(snapshot[1][name])) for name, a in snapshot[0].items())


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


LIMITS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=5, derandomize=True, **LIMITS)
@given(data=st.data())
def test_any_sequence_of_operations(case, data):
    with torch.no_grad():
        sequence(*CASES[case], data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=67, **LIMITS)
@given(data=st.data())
def test_two_thousand_sequences_of_operations(case, data):
    """67 for each of 30 schemes."""
    with torch.no_grad():
        sequence(*CASES[case], data)
