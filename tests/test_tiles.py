"""Tile tables: which entry serves which operands, whose table counts, and what a broken file says."""

from __future__ import annotations

import json
import re

import pytest

from hf_wsvd.kernels import tiles
from hf_wsvd.kernels.tile_table import SIZES, load
from hf_wsvd.kernels.tiles import (
    SHIPPED,
    TILES,
    Tile,
    file_name,
    fixed_tile,
    shipped_table,
    split_tokens,
    tile_for,
    user_table,
)


SIZES_OF_A_TILE = {"block_tokens": 64, "split_tokens": 4096, "num_warps": 4, "num_stages": 3}
OPERANDS = {"head_dim": 128, "key_rank": 64, "value_rank": 64, "bits": 16, "group": 1}
HOPPER = {
    **{"kernel": "tile_reconstruction", "num_stages": 4, "heads": 2, "groups": 4, "chunk": 32, "shortest_split": 256}
}
MEASURED = {**OPERANDS, "tokens": 8192, "rows": 64}


def tile(kernel="general", **changed) -> Tile:
    operands = {**OPERANDS, "tokens": 8192, "batch": 2, "kv_heads": 32, "device": "cpu", **changed}
    return tile_for(kernel, **operands)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """`table(*entries, **fields)` writes a file of entries for the general kernel that `HF_WSVD_TILES` names."""

    def write(*entries: dict, **fields):
        path = tmp_path / f"table{len(list(tmp_path.iterdir()))}.json"
        rows = [entry if "groups" in entry else {"kernel": "general", **SIZES_OF_A_TILE, **entry} for entry in entries]
        path.write_text(json.dumps({"tiles": rows, **fields}))
        monkeypatch.setenv("HF_WSVD_TILES", str(path))
        return path

    return write


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_sound(path):
    assert load(path).entries


@pytest.mark.parametrize("kernel", ["general", "position_query", "tile_reconstruction"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 1000, 131_072])
def test_there_is_a_tile_for_any_operands(kernel, head_dim, tokens):
    found = tile(kernel, head_dim=head_dim, bits=3, code="codebook", group=7, tokens=tokens, batch=1, kv_heads=3)
    assert type(found) is TILES[kernel]
    assert found._fields == tuple(sorted(SIZES[kernel], key=found._fields.index))
    assert all(low <= getattr(found, field) <= high for field, (low, high, _) in SIZES[kernel].items())
    if kernel == "general":
        assert found.split_tokens % found.block_tokens == 0


def test_the_nearest_entry_serves(table):
    table(
        {**MEASURED, "num_warps": 1},
        {**MEASURED, "tokens": 65536, "num_warps": 2},
        {**MEASURED, "key_rank": 32, "value_rank": 32, "num_warps": 8},
    )
    assert tile().num_warps == 1
    assert tile(tokens=12_000).num_warps == 1
    assert tile(tokens=100_000).num_warps == 2
    assert tile(key_rank=24, value_rank=24).num_warps == 8


def test_head_dim_bits_and_code_must_be_equal(table):
    table(
        {"head_dim": 64, "bits": 16, "num_warps": 1},
        {"head_dim": 128, "bits": 8, "num_warps": 2},
        {"head_dim": 128, "bits": 8, "code": "fp8", "num_warps": 8},
    )
    assert tile(head_dim=64).num_warps == 1
    assert tile(bits=8).num_warps == 2
    assert tile(bits=8, code="symmetric").num_warps == 2
    assert tile(bits=8, code="fp8").num_warps == 8
    assert tile(bits=4) == tile_of_the_shipped_table(bits=4)


def tile_of_the_shipped_table(**changed) -> Tile:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_WSVD_TILES")
        return tile(**changed)


def test_an_entry_for_these_operands_beats_an_open_one(table):
    table({"num_warps": 8}, {**MEASURED, "num_warps": 2})
    assert tile().num_warps == 2
    assert tile(bits=4).num_warps == 8


def test_a_measured_split_serves_only_as_many_programs(table):
    table({**MEASURED, "split_tokens": 128})
    assert tile().split_tokens == 128
    assert tile(tokens=16_384).split_tokens == 128
    assert tile(tokens=131_072).split_tokens != 128
    assert tile(batch=32).split_tokens != 128


def test_a_split_measured_on_more_multiprocessors_is_not_taken(table):
    table({**MEASURED, "split_tokens": 128}, multiprocessors=132)
    assert tile().split_tokens != 128


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [(32768, 32, 4096), (8192, 256, 4096), (8192, 512, 8192), (131_072, 512, 8192), (1024, 8, 64), (1, 1, 64)],
)
def test_splits_fill_the_device_and_are_powers_of_two(tokens, rows, expected):
    assert split_tokens(tokens, rows, block_tokens=64, multiprocessors=132) == expected


def test_growing_by_a_token_looks_nothing_up(table):
    table(MEASURED)
    tile(tokens=9000)
    before = tiles._tile_for.cache_info()
    assert {tile(tokens=tokens) for tokens in range(9001, 9100)} == {tile(tokens=9000)}
    assert tiles._tile_for.cache_info().misses == before.misses


def test_the_named_table_then_the_users_then_the_shipped(table, tmp_path, monkeypatch):
    named = table({**MEASURED, "num_warps": 1})
    own = tmp_path / "own.json"
    own.write_text(named.read_text().replace('"num_warps": 1', '"num_warps": 16'))
    monkeypatch.setattr(tiles, "user_table", lambda device_name: own)
    tiles._tile_for.cache_clear()
    assert tile().num_warps == 1
    monkeypatch.delenv("HF_WSVD_TILES")
    assert tile().num_warps == 16
    own.unlink()
    tiles._tile_for.cache_clear()
    assert tile().num_warps == 4
    tiles._tile_for.cache_clear()


def test_the_users_table_lies_in_the_cache_of_hugging_face():
    from huggingface_hub.constants import HF_HOME

    assert str(user_table("nvidia_h200")) == f"{HF_HOME}/hf_wsvd/tiles/nvidia_h200.json"


def test_names_of_devices(monkeypatch, tmp_path):
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    monkeypatch.setattr(tiles, "SHIPPED", tmp_path)
    (tmp_path / "nvidia_h100.json").touch()
    assert shipped_table("nvidia_h100_80gb_hbm3") == tmp_path / "nvidia_h100.json"
    assert shipped_table("nvidia_h1") is None
    assert shipped_table("nvidia_h1000") is None


def test_a_tile_can_be_fixed_for_a_while():
    chosen, fixed = tile(), Tile(32, 128, 8, 2)
    with fixed_tile(fixed) as asked:
        assert tile() == tile("position_query") == fixed
    assert asked == ["general", "position_query"]
    with fixed_tile(None) as asked:
        assert tile() == chosen
    assert asked == ["general"]
    assert tile() == chosen


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="got 'fast'; allowed: general, position_query, tile_reconstruction"):
        tile("fast")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"block_tokens": 48}, "block_tokens must be a power of two from 16 to 512, got 48"),
        ({"block_tokens": None}, "block_tokens must be a power of two from 16 to 512, got None"),
        ({"split_tokens": 32}, "split_tokens must be at least block_tokens (64), got 32"),
        ({"num_warps": 4.0}, "num_warps must be a power of two from 1 to 16, got 4.0"),
        ({"num_stages": 9}, "num_stages must be a whole number from 1 to 8, got 9"),
        ({"heads": 1}, "has unknown fields heads; allowed for general: bits, block_tokens, "),
        ({**HOPPER, "heads": True}, "heads must be a power of two from 1 to 4, got True"),
        ({**HOPPER, "groups": 5}, "groups must be a whole number from 2 to 4, got 5"),
        ({**HOPPER, "chunk": 48}, "chunk must be a power of two from 32 to 64, got 48"),
        ({**HOPPER, "shortest_split": None}, "shortest_split must be a power of two from 64 to 1048576, got None"),
        ({**HOPPER, "num_warps": 4}, "has unknown fields num_warps; allowed for tile_reconstruction: bits, chunk, "),
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"code": 8}, "code must be a name, got 8"),
        ({"kernel": None}, "kernel must be one of general, position_query, tile_reconstruction, got None"),
        ({"kernel": "fast"}, "kernel must be one of general, position_query, tile_reconstruction, got 'fast'"),
        ({"warps": 4}, "has unknown fields warps; allowed for general: bits, block_tokens, "),
    ],
)
def test_a_broken_entry_is_named(table, entry, message):
    path = table({}, entry)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        tile()
    assert str(raised.value).startswith(f"{path}: tiles[1]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a tile table, not JSON"),
        ("[]", 'must be an object with a list "tiles"'),
        ('{"tiles": {}}', 'must be an object with a list "tiles"'),
        ('{"tiles": [1]}', "tiles[0] must be an object, got 1"),
        ('{"tiles": [], "multiprocessors": "all"}', "multiprocessors must be a whole number of at least 1, got 'all'"),
    ],
)
def test_a_broken_file_is_named(table, text, message):
    path = table()
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        tile()
    assert str(path) in str(raised.value)


def test_a_table_that_is_named_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_WSVD_TILES", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        tile()
