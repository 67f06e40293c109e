"""benchmarks/generate.py on a shape so small that it runs anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # scripts there import one another

import generate


SMALL = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "24", "--new-tokens", "4"]


def rows_of(output, *arguments):
    generate.main([*SMALL, "--output", str(output), *arguments])
    return {row["cache"]: row for row in json.loads(output.read_text())["rows"]}


FEW = ["dynamic", "quantized-hqq", "latent-int8"]


@pytest.mark.parametrize("caches", [FEW, pytest.param(list(generate.VARIANTS), marks=pytest.mark.slow)], ids=len)
def test_every_cache_gets_a_row_with_its_times_or_why_not(caches, tmp_path, monkeypatch):
    monkeypatch.setattr(generate.importlib.util, "find_spec", lambda name: None)
    rows = rows_of(tmp_path / "rows.json", "--repeats", "1", "--caches", *caches)
    assert list(rows) == caches
    for name, row in rows.items():
        if name.startswith("quantized"):
            assert "is not installed" in row["error"]
        else:
            assert row["ms_per_token"] > 0
            assert row["ttft_ms"] > 0
            assert (row["batch"], row["tokens"], row["compiled"], row["peak_gb"]) == (1, 24, False, None)


def test_rows_of_another_run_stay_and_those_of_the_same_case_are_replaced(tmp_path):
    output = tmp_path / "rows.json"
    rows_of(output, "--caches", "dynamic", "--batch", "2")
    both = ["--caches", "dynamic", "latent", "--turns", "2"]
    rows_of(output, *both)
    rows = rows_of(output, *both)
    assert rows["dynamic"]["share_of_first"] == 1
    found = json.loads(output.read_text())["rows"]
    assert [(row["batch"], row["cache"]) for row in found] == [(2, "dynamic"), (1, "dynamic"), (1, "latent")]


@pytest.mark.parametrize("most", [0, 1, 7, 61])
def test_the_largest_batch_is_found_to_a_sixteenth(most):
    found = generate.largest_batch(lambda batch: batch <= most)
    assert most - max(0, most // 16) <= found <= most


def test_the_largest_batch_is_a_row_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "fits", lambda model, variant, batch, tokens: batch <= 3)
    rows = rows_of(tmp_path / "rows.json", "--caches", "latent-int8", "--largest-batch")
    assert rows["latent-int8"]["largest_batch"] == 3


def test_more_new_tokens_than_tokens_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rows_of(tmp_path / "rows.json", "--new-tokens", "24")
    assert "allowed: 2 to 23" in capsys.readouterr().err
