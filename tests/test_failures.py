"""A compression that fails leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from model_facts import hooks, logits, projections
from tiny_models import CLOSED_FORM, calibration_batches, prompt
from transformers import PreTrainedModel

import hf_wsvd
from hf_wsvd import WSVDConfig


def failing(kind: str, model: PreTrainedModel) -> dict:
    good = calibration_batches("llama")
    if kind == "no batch":
        return {"calibration": []}
    if kind == "wrong ids":
        return {"calibration": [*good, {"input_ids": torch.tensor([[500]])}]}
    if kind == "wrong column":
        return {"calibration": [{"text": "hello"}]}
    if kind == "failing iterator":
        return {"calibration": (batch if number < 1 else 1 / 0 for number, batch in enumerate(good))}
    if kind == "rank too high":
        return {"config": WSVDConfig(k_rank=17), "calibration": good}
    if kind == "statistics of another model":
        return {"statistics": hf_wsvd.collect_statistics(tiny_models.build("qwen2_vl"), prompt("qwen2_vl"))}
    model.model.layers[2].self_attn.v_proj.weight.data[0, 0] = float("nan")
    return {"calibration": good}


@pytest.mark.parametrize(
    "kind",
    [
        "no batch",
        "wrong ids",
        "wrong column",
        "failing iterator",
        "rank too high",
        "statistics of another model",
        "NaN weight",
    ],
)
def test_a_failing_compression_leaves_the_model_as_it_was(kind, dense):
    model = copy.deepcopy(dense("llama"))
    arguments = failing(kind, model)
    before, keys, config = logits(model, "llama"), list(model.state_dict()), model.config.to_dict()
    hooks_before = hooks(model)
    with pytest.raises((ValueError, ZeroDivisionError)):
        hf_wsvd.compress(model, **arguments)
    torch.testing.assert_close(logits(model, "llama"), before, rtol=0, atol=0, equal_nan=True)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert hooks(model) == hooks_before
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    if kind != "NaN weight":
        hf_wsvd.compress(model, WSVDConfig(**CLOSED_FORM), calibration=calibration_batches("llama"))
        assert set(projections(model).values()) == {8}
