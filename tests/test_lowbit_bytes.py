"""The table of bytes in docs/low_precision.md is what the shapes give, and within what was promised."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts there import one another
import lowbit_bytes  # noqa: E402
from hf_wsvd.meta_model import MetaModel  # noqa: E402


PROMISED = {"W8A8": 0.53, "W4A16": 0.30}  # of the language model in bf16, at rank ratio 0.5
ROWS = {
    (row["weights"], row["rank_ratio"]): row
    for row in json.loads((ROOT / "docs" / "results" / "lowbit_bytes.json").read_text())["rows"]
}


@pytest.mark.parametrize("name", PROMISED)
def test_the_recorded_shares_keep_the_promise_and_stand_in_the_documentation(name):
    row = ROWS[name, 0.5]
    assert row["share_of_bf16"]["language model"] <= PROMISED[name]
    assert row["share_of_bf16_at_same_rank"]["language model"] <= PROMISED[name]
    assert row["up_factor_share_of_own"] < 0.01
    page = (ROOT / "docs" / "low_precision.md").read_text()
    for part in ("blocks", "language model", "all"):
        assert f"{row['bytes'][part] / 1e9:.2f} GB ({row['share_of_bf16'][part]:.3f})" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_the_shapes_give_the_recorded_bytes(name):
    dense = lowbit_bytes.part_bytes(MetaModel(lowbit_bytes.llava_7b(), dtype="bfloat16").model)
    found = lowbit_bytes.row(name, lowbit_bytes.FORMATS[name], 0.5, dense)
    assert found["bytes"] == ROWS[name, 0.5]["bytes"]
    assert found["share_of_bf16"] == ROWS[name, 0.5]["share_of_bf16"]
