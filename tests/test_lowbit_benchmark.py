"""The low-precision sweep: rows that come from one fit, and runs that go on."""

import argparse
import copy
import json
import sys
from pathlib import Path

import tiny_models
import torch


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # scripts there import one another
import hf_wsvd
import lowbit
from hf_wsvd import LowPrecisionConfig, WSVDConfig


def test_rounding_a_compressed_model_is_the_same_as_compressing_with_low_precision(statistics):
    batches = tiny_models.calibration_batches("llama")
    fields = {"rank_ratio": 0.5, "self_check": "none", **tiny_models.CLOSED_FORM}
    low = LowPrecisionConfig(activation_bits=4, method="quarot")
    whole = hf_wsvd.compress(
        tiny_models.build("llama"), WSVDConfig(**fields, low_precision=copy.deepcopy(low)), calibration=batches
    )
    fitted = hf_wsvd.compress(tiny_models.build("llama"), WSVDConfig(**fields), statistics=statistics("llama"))
    before = copy.deepcopy(fitted.state_dict())
    model, record = lowbit.rounded(fitted, low, batches, statistics("llama"))
    batch = tiny_models.prompt("llama")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, whole(**batch).logits)
    assert record["method"] == "quarot"
    assert all(torch.equal(value, before[name]) for name, value in fitted.state_dict().items())


class OneTask:
    """A tiny model whose only metric is its agreement with itself."""

    name = "vlm"
    settings = {}  # noqa: RUF012

    def __init__(self):
        self.model, self.source = tiny_models.build("llama"), self

    def calibration(self, seed: int) -> list[dict[str, torch.Tensor]]:
        return [tiny_models.prompt("llama", batch=4, tokens=16, seed=seed + 101)]

    def prepare(self, dtype: torch.dtype) -> None:
        pass

    def scores(self, model, setting):
        metrics = {name: lowbit.Score(0.5) for name in ("accuracy_mean", "accuracy_at", "kl")}
        return argparse.Namespace(metrics=metrics)


def test_rows_hold_what_names_them_and_a_second_run_adds_only_what_is_missing(tmp_path, monkeypatch):
    output = tmp_path / "lowbit.json"
    monkeypatch.setattr(lowbit, "vision_task", lambda *arguments: OneTask())
    monkeypatch.setattr(lowbit, "WSVDConfig", lambda **fields: WSVDConfig(**fields, **tiny_models.CLOSED_FORM))
    common = ["lowbit.py", "--model", "vlm", "--checkpoint", "x", "--seeds", "0", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*common, "--forms", "W8A8", "--methods", "rtn"])
    lowbit.main()
    first = json.loads(output.read_text())["rows"]
    monkeypatch.setattr(sys, "argv", [*common, "--forms", "W8A8", "W4A16", "--methods", "rtn"])
    lowbit.main()
    rows = json.loads(output.read_text())["rows"]
    assert rows[:1] == first
    assert [(row["weight_bits"], row["activation_bits"]) for row in rows] == [(8, 8), (4, 16)]
    known = {"model": "vlm", "method": "rtn", "cache_bits": 8, "rank_ratio": 0.5, "seed": 0, "mean": 0.5}
    assert known.items() <= rows[1].items()
    assert rows[1]["accuracy"] == {"at": 0.5}
    assert rows[1]["baseline_16_bit"] == {"mean": 0.5, "accuracy": {"at": 0.5}, "kl": 0.5}
