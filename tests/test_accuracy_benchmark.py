"""The accuracy sweep's own arithmetic: budgets, rank plans, correlation, scores, merged parts and their table."""

import json
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts there import one another
from tiny_models import build  # noqa: E402

import accuracy_measure as measuring  # noqa: E402
import accuracy_methods as methods  # noqa: E402
import smollm2  # noqa: E402
import tables  # noqa: E402


def part(seed: int, values: dict[str, float], **changes) -> dict:
    """What a process writes that measured one accuracy by method at two ratios."""
    rows = [
        {
            "model": "vlm",
            "method": method,
            "kv_ratio": ratio,
            "seed": seed,
            "metric": metric,
            "value": value * ratio,
            "standard_error": 0.01,
            "dense_value": 1.0,
            "kv_share": ratio,
        }
        for method, value in values.items()
        for ratio in (0.5, 0.3)
        for metric in ("accuracy_at", "accuracy_mean", "kl")
    ]
    environment = {"threads": 1, "load_average": 0.0, "transformers": "5", "torch": "2", "device": "cpu"}
    return {
        "command": f"python benchmarks/accuracy.py --seeds {seed}",
        "environment": environment,
        "model": "a model",
        "settings": {"questions_per_type": 1, "calibration_questions_per_type": 1},
        "seconds": [{"seed": seed}],
        "configurations": [],
        "rows": rows,
        **changes,
    }


def test_kv_share_stays_within_the_ratio():
    assert methods.kv_share([16, 48], [32, 32], 64, ratio=0.5) == 0.5
    with pytest.raises(ValueError, match=r"136 in all are more than 0\.5 of 256"):
        methods.kv_share([24, 48], [32, 32], 64, ratio=0.5)


def test_every_uniform_row_may_use_the_whole_rank():
    uniform = [fields for fields in methods.METHODS.values() if fields["rank_allocation"] == "uniform"]
    assert len(uniform) == 7
    assert all(fields["rank_multiple"] == 1 for fields in uniform)


@pytest.mark.parametrize("ratio", [None, 0.5, 0.3])
def test_random_plans_are_valid_and_differ(ratio):
    plans = methods.random_plans(12, 30, 64, torch.Generator().manual_seed(0), ratio)
    ranks = torch.tensor(plans)  # [plan, side, layer]
    assert ranks.shape == (12, 2, 30)
    assert ((ranks % 8 == 0) & (ranks >= 8) & (ranks <= 64)).all()
    assert len({str(plan) for plan in plans}) == 12
    totals = ranks.sum((1, 2))
    if ratio is None:
        assert totals.max() > 2 * totals.min()
    else:
        limit = int(ratio * 60 * 64)
        assert (totals == limit - limit % 8).all()
    assert plans == methods.random_plans(12, 30, 64, torch.Generator().manual_seed(0), ratio)


def test_spearman_sees_order_alone():
    assert methods.spearman([1, 2, 3, 10], [0.1, 0.2, 5, 6]) == pytest.approx(1)
    assert methods.spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    # scipy.stats.spearmanr([1, 2, 2, 3], [1, 3, 2, 4])
    assert methods.spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486833)


def test_merged_parts_hold_every_row_in_order():
    parts = [part(1, {"wsvd": 0.9, "svd": 0.1}), part(0, {"svd": 0.2}, prediction={"seed": 0})]
    merged = methods.merge_parts(parts)
    assert merged["commands"] == [p["command"] for p in parts]
    assert merged["prediction"] == {"seed": 0}
    assert [(r["method"], r["kv_ratio"], r["seed"]) for r in merged["rows"] if r["metric"] == "kl"] == [
        ("svd", 0.5, 0),
        ("svd", 0.5, 1),
        ("svd", 0.3, 0),
        ("svd", 0.3, 1),
        ("wsvd", 0.5, 1),
        ("wsvd", 0.3, 1),
    ]


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="differ in settings"):
        methods.merge_parts([part(0, {"svd": 0.1}), part(1, {"svd": 0.1}, settings={})])
    with pytest.raises(ValueError, match="measured twice"):
        methods.merge_parts([part(0, {"svd": 0.1}), part(0, {"svd": 0.1})])


def test_table_of_a_sweep(tmp_path):
    parts = [part(0, {"svd": 0.1, "wsvd": 0.7, "wsvd+allocation": 0.8}), part(1, {"svd": 0.3, "wsvd+allocation": 0.9})]
    (tmp_path / "fit_vlm.json").write_text(json.dumps(methods.merge_parts(parts)))
    page = tables.rewritten("<!-- table:fit_vlm -->\n<!-- end -->", tmp_path)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert lines[0] == "| KV ratio | 0.5 | 0.3 | average |"
    assert lines[2] == "| svd | 10.00 ± 7.07 | 6.00 ± 4.24 | 8.00 |"
    assert lines[3] == "| wsvd | 35.00 | 21.00 | 28.00 |"
    assert lines[4] == "| wsvd+allocation | **42.50 ± 3.54** | **25.50 ± 2.12** | **34.00** |"
    assert "`wsvd+allocation`: best at 0.5, 0.3." in page
    assert "dense: 100.0" in page


def test_a_model_measured_against_itself():
    model = build("llama")
    ids = torch.arange(24).view(3, 8) % model.config.vocab_size
    labels = ids.clone()
    labels[:, :5] = -100
    labels[2, 6:] = -100
    batches = [measuring.EvaluationBatch({"input_ids": ids}, labels)]
    states = [measuring.counted_states(model, batch) for batch in batches]
    sums = measuring.measure(model, batches, states)
    assert sums.tokens.tolist() == [3, 3, 1]
    assert sums.kl.abs().max() < 1e-6
    loss = model(input_ids=ids, labels=labels).loss.item()
    assert measuring.ratio_estimate(sums.nll, sums.tokens).value == pytest.approx(loss, rel=1e-5)
    logits = model(input_ids=ids).logits[:, :-1]
    right = (logits.argmax(-1) == labels[:, 1:]).sum(1)
    assert sums.right.tolist() == right.tolist()


def test_windows_do_not_overlap():
    tokens = torch.arange(1000)
    windows = smollm2.drawn_windows(tokens, 6, 100, torch.Generator().manual_seed(0))
    assert windows.shape == (6, 100)
    assert len(windows.unique()) == 600
    assert smollm2.leading_windows(tokens, 20, 64).flatten().tolist() == list(range(960))
    with pytest.raises(ValueError, match="hold no 6 windows of 200"):
        smollm2.drawn_windows(tokens, 6, 200, torch.Generator())
