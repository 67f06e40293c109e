"""`hf-wsvd tune` with times that are made up: which tile wins, what is left out, what the file holds."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from hf_wsvd.cli.app import run
from hf_wsvd.evaluate import tile_tuning
from hf_wsvd.evaluate.decode_operands import DecodeShape, random_operands
from hf_wsvd.evaluate.device_timing import Times
from hf_wsvd.evaluate.tile_tuning import Case, TableFile, Tuned, effect, tune_case
from hf_wsvd.kernels.tile_table import load
from hf_wsvd.kernels.tiles import PositionQueryTile, Tile, TileReconstructionTile, tile_for


SHAPE = DecodeShape(batch=2, tokens=512, query_heads=4, kv_heads=2, head_dim=16, key_rank=8, value_rank=8)
CASE = Case(SHAPE, "float", 16)
BEST = Tile(64, 128, 8, 4)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def used_tile() -> Tile:
    """What a kernel would be told."""
    operands = {"head_dim": 16, "key_rank": 8, "value_rank": 8, "bits": 16, "group": 2, "tokens": 512}
    return tile_for("general", **operands, batch=2, kv_heads=2, device="cpu")


@pytest.fixture
def made_up_times(monkeypatch) -> None:
    """A tile is the slower the more of its sizes differ from those of `BEST`."""

    def times(calls, replays=100):
        tile = used_tile()
        differing = sum(got != best for got, best in zip(tile, BEST))
        return Times(1.0 + differing, 1.0, 9.0, 100)

    monkeypatch.setattr(tile_tuning, "cold_times", times)
    monkeypatch.setattr(tile_tuning, "input_sets", lambda bytes_of_a_set, device: 2)


@pytest.fixture
def device(monkeypatch) -> SimpleNamespace:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@needs_triton
def test_the_fastest_tile_wins(made_up_times):
    def attention(operands):
        used_tile()
        return torch.ones(2)

    tuned = tune_case(CASE, attention, pytest.fail, device="cpu")
    assert (tuned.kernel, tuned.tile, tuned.times.median) == ("general", BEST, 1.0)


@needs_triton
def test_tiles_that_fail_or_give_another_result_are_left_out(made_up_times):
    told = []

    def attention(operands):
        tile = used_tile()
        if tile.num_warps == 8:
            raise ValueError("too many warps")
        return torch.ones(2) * (1.1 if tile.num_stages == 4 else 1.0)

    tuned = tune_case(CASE, attention, told.append, device="cpu")
    assert (tuned.tile.num_warps, tuned.tile.num_stages) == (4, 2)
    assert any("ValueError" in line for line in told)
    assert any("the result differs by 0.1" in line for line in told)


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "kv_heads", "best"),
    [
        ("position_query", 4, PositionQueryTile(4, 1, 1024)),
        ("tile_reconstruction", 2, TileReconstructionTile(4, 2, 128, 4, 32)),
        ("tile_reconstruction", 1, TileReconstructionTile(8, 1, 256, 3, 64)),
    ],
)
def test_the_fields_that_a_hopper_kernel_reads_are_tried_and_no_launch_twice(kernel, kv_heads, best, monkeypatch):
    shape = SHAPE._replace(head_dim=128, key_rank=64, value_rank=64, kv_heads=kv_heads, tokens=4096)
    case = CASE._replace(shape=shape)
    launched = []

    def tile():
        keys = case.keys()
        return tile_for(kernel, batch=keys.pop("rows"), kv_heads=1, **keys, device="cpu")

    def times(calls, replays=100):
        launched.append(tile())
        return Times(1.0 + sum(got != wanted for got, wanted in zip(tile(), best)), 1.0, 9.0, 100)

    monkeypatch.setattr(tile_tuning, "cold_times", times)
    monkeypatch.setattr(tile_tuning, "input_sets", lambda bytes_of_a_set, device: 1)
    tuned = tune_case(case, lambda operands: torch.ones(2) * bool(tile()), pytest.fail, device="cpu")
    assert (tuned.kernel, tuned.tile) == (kernel, best)
    operands = random_operands(case.shape, device="cpu")
    effects = [effect(kernel, some, case.shape, operands, torch.device("cpu")) for some in launched]
    assert len(set(effects)) == len(effects) == tuned.candidates > 5


def test_a_case_that_no_kernel_serves_is_an_error(made_up_times):
    with pytest.raises(ValueError, match="no kernel with tiles serves"):
        tune_case(CASE, lambda operands: torch.ones(2), pytest.fail, device="cpu")


def test_the_table_holds_what_was_found_and_kernels_read_it(device, tmp_path, monkeypatch):
    path = tmp_path / "new" / "table.json"
    table = TableFile(path)
    assert not table.has(CASE)
    for warps in (4, 8):  # the second takes the place of the first
        table.add(CASE, Tuned("general", BEST._replace(num_warps=warps), Times(0.1234567, 0.1, 0.2, 100), 30))
    assert table.has(CASE)
    assert load(path).multiprocessors == 132
    (row,) = json.loads(path.read_text())["tiles"]
    assert row["ms"] == 0.12346
    monkeypatch.setenv("HF_WSVD_TILES", str(path))
    assert used_tile()[:1] + used_tile()[2:] == BEST[:1] + BEST[2:]


def test_a_run_goes_on_where_it_stopped(device, tmp_path):
    TableFile(tmp_path / "table.json").add(CASE, Tuned("general", BEST, Times(0.1, 0.1, 0.1, 9), 30))
    later = TableFile(tmp_path / "table.json")
    assert later.has(CASE)
    assert not later.has(CASE._replace(bits=8, code="symmetric"))
    later.add(CASE._replace(bits=8, code="fp8"), Tuned("general", BEST, Times(0.1, 0.1, 0.1, 9), 30))
    assert [entry.keys.get("code") for entry in load(tmp_path / "table.json").entries] in ([None, "fp8"],)


def test_a_table_of_another_device_or_no_table_is_not_written_over(device, tmp_path):
    path = tmp_path / "table.json"
    TableFile(path).add(CASE, Tuned("general", BEST, Times(0.1, 0.1, 0.1, 9), 30))
    device.name = "NVIDIA A100"
    with pytest.raises(ValueError, match="is a table of 'NVIDIA H200', this device is 'NVIDIA A100'"):
        TableFile(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="exists and is no tile table"):
        TableFile(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tune needs a CUDA device, and torch finds none here"),
        (["--bits", "5"], "--bits must be one of 16, 8, 4, 3, 2 with --code symmetric, got 5"),
        (["--bits", "4", "--code", "fp8"], "--bits must be one of 16, 8 with --code fp8, got 4"),
        (["--code", "float"], "--code must be one of fp8, symmetric, asymmetric, codebook, got float"),
        (["--rank", "129"], "--rank must be from 1 to --head-dim (128), got 129"),
        (["--head-dim", "320"], "--head-dim must be an even number from 2 to 256, got 320"),
        (["--query-heads", "28", "--kv-heads", "8"], "--query-heads must be a multiple of --kv-heads (8), got 28"),
        (["--kv-heads", "0"], "--kv-heads must be at least 1, got 0"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--queries", "17"], "--queries must be from 1 to 16, got 17"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["tune", *arguments]) == 2
    assert capsys.readouterr().err == f"hf-wsvd: error: {message}\n"
