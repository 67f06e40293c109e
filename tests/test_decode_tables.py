"""The decode benchmark's tables, and when a run counts as slower than an earlier one."""

import copy
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # scripts there import one another
import decode_tables


@pytest.fixture
def results() -> dict:
    row = {
        **{"device": "GPU", "batch": 16, "tokens": 8192, "query_heads": 32, "kv_heads": 8, "head_dim": 128},
        **{"rank": 64, "code": "symmetric", "bits": 4, "kernel": "general"},
        **{"ms": 0.05, "ms_p10": 0.04, "ms_p90": 0.06},
        **{"replays": 100, "floor_ms": 0.02, "gb_per_s": 1700.0, "share_of_read_bandwidth": 0.4},
        **{"dense_ms": {"cuDNN SDPA": 0.13, "FlashInfer": 0.12}, "speedup_vs_best_dense": 2.4, "other_ms": {}},
    }
    slower = {**copy.deepcopy(row), "code": "fp8", "bits": 8, "ms": 0.06, "other_ms": {"wsvd_method": 0.31}}
    environment = dict.fromkeys(("threads", "load_average", "transformers", "torch", "device"), "x")
    return {"rows": [row, slower], "read_bandwidth": 4.2e12, "environment": environment, "command": "c"}


def test_the_best_dense_kernel_stands_in_the_table(results):
    lines = decode_tables.decode(results).splitlines()
    assert "| 32/8 x 128, 64 | 16 x 8,192 | int4 | 0.0500 |" in lines[2]
    assert "| 0.1200 (FlashInfer) | 2.40 |  |" in lines[2]
    assert lines[3].endswith("| 0.3100 |")
    assert "reads 4.20 TB/s" in lines[5]


def test_baselines_have_one_line_a_shape(results):
    results["rows"].append({**results["rows"][0], "tokens": 4096, "dense_ms": {"cuDNN SDPA": 0.07}})
    lines = decode_tables.decode_baselines(results).splitlines()
    assert lines[2:4] == [
        "| 32/8 x 128 | 16 x 8,192 | 0.1300 | 0.1200 |",
        "| 32/8 x 128 | 16 x 4,096 | 0.0700 |  |",
    ]


def test_checks_are_told_by_group_dtype_and_kernel(results):
    row = {"group": "codes", "dtype": "bfloat16", "kernels": ["general"], "tolerance": 0.01, "complaint": None}
    wrong, other = {**row, "error": 0.02, "complaint": "error"}, {**row, "error": 0.1, "group": "x"}
    rows = [{**row, "error": 0.001}, wrong, {**row, "error": 0.004}, other]
    lines = decode_tables.kernels_check({**results, "rows": rows}).splitlines()
    assert lines[2:4] == [
        "| codes | bfloat16 | general | 3 | 2.0e-02 | 1.0e-02 | 1 |",
        "| x | bfloat16 | general | 1 | 1.0e-01 | 1.0e-02 | 0 |",
    ]


@pytest.mark.parametrize(("factor", "slower"), [(1.02, 0), (1.04, 1), (0.5, 0)])
def test_only_more_than_the_tolerance_is_a_regression(results, factor, slower):
    now = copy.deepcopy(results)
    now["rows"][0]["ms"] *= factor
    found = decode_tables.regressions(now, results, tolerance=0.03)
    assert len(found) == slower
    if slower:
        assert "code symmetric, bits 4: 0.0520 ms, was 0.0500 (+4.0%)" in found[0]


def test_rows_that_only_one_run_has_are_no_regression(results):
    now = copy.deepcopy(results)
    now["rows"][0] |= {"tokens": 1, "ms": 9.0}
    assert decode_tables.regressions(now, results, tolerance=0.03) == []
