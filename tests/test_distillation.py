"""Refinement by the dense model's answers: better on held-out groups or nothing, and the model left as it was."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch

import hf_wsvd
from hf_wsvd.calibration import answers, grouping
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.evaluate.divergence import divergence
from hf_wsvd.fit import fitted


def batches(family: str, seeds: range) -> list[dict[str, torch.Tensor]]:
    return [tiny_models.prompt(family, batch=4, tokens=16, seed=seed) for seed in seeds]


@pytest.fixture(scope="module", params=["llama", "qwen2_vl"])
def measured(request, dense):
    """(dense model, statistics in groups of few tokens, batches that calibration has not seen)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_wsvd.calibration.collect.group_tokens", lambda device: 64)
        statistics = hf_wsvd.collect_statistics(dense(request.param), batches(request.param, range(100, 124)))
    assert len(statistics.answered) == 24
    return dense(request.param), statistics, batches(request.param, range(200, 204))


def config(**options) -> hf_wsvd.WSVDConfig:
    options = {"refinement_steps": 40, "refinement_learning_rate": 2e-3, **options}
    return hf_wsvd.WSVDConfig(0.5, rank_allocation="uniform", **options)


def test_it_brings_the_model_nearer_to_the_dense_one_on_data_it_has_not_seen(measured):
    model, statistics, unseen = measured
    dense = copy.deepcopy(model)
    found = {}
    for refinement in ("none", "distillation"):
        with fitted(model, config(refinement=refinement, refinement_steps=80), statistics):
            found[refinement] = divergence(dense, model, unseen).kl
    assert found["distillation"] < 0.97 * found["none"]


def test_the_record_tells_the_held_out_divergence(measured):
    model, statistics, _ = measured
    with fitted(model, config(), statistics) as fit:
        assert 0 < fit.info["refinement_kl"]["after"] < fit.info["refinement_kl"]["before"]


def test_it_keeps_the_start_where_no_step_is_better(measured):
    model, statistics, _ = measured
    with fitted(model, config(refinement="none"), statistics):
        start = model.get_decoder().layers[0].self_attn.v_proj.merged().weight
    with fitted(model, config(refinement_learning_rate=1.0), statistics) as fit:
        assert fit.info["refinement_kl"]["after"] == fit.info["refinement_kl"]["before"]
        found = model.get_decoder().layers[0].self_attn.v_proj.merged().weight
    torch.testing.assert_close(found, start, rtol=0, atol=1e-5)


def test_the_same_seed_gives_the_same_factors(measured):
    model, statistics, _ = measured
    weights = []
    for seed in (3, 3, 4):
        with fitted(model, config(seed=seed), statistics):
            weights.append(model.get_decoder().layers[1].self_attn.k_proj.weight.clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_up_factors_keep_orthonormal_columns(measured):
    model, statistics, _ = measured
    with fitted(model, config(), statistics):
        up = model.get_decoder().layers[1].self_attn.k_proj.up
        torch.testing.assert_close(up.mT @ up, torch.eye(8).expand(len(up), -1, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trainable", [True, False])
def test_the_model_is_left_as_it_was(measured, trainable):
    model, statistics, _ = measured
    model = copy.deepcopy(model).train().requires_grad_(trainable)
    model.lm_head.weight.requires_grad_(not trainable)
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    with fitted(model, config(), statistics) as fit:
        fit.keep()
    after = dict(model.named_parameters())
    for name, (value, requires_grad) in before.items():
        if name.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight")) and "visual" not in name:
            assert after[name].requires_grad is trainable
            continue
        assert torch.equal(after[name], value)
        assert after[name].requires_grad is requires_grad
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_interruption_leaves_the_dense_model(measured, monkeypatch):
    model, statistics, _ = measured
    monkeypatch.setattr("hf_wsvd.fit.distillation.Master.take_gradients", _interrupt)
    with pytest.raises(KeyboardInterrupt), fitted(model, config(), statistics):
        pass
    assert all(isinstance(a.module.k_proj, torch.nn.Linear) for a in decoder_attentions(model))
    assert not any(parameter.grad is not None for parameter in model.parameters())


def _interrupt(*args) -> None:
    raise KeyboardInterrupt


def test_full_ranks_are_not_refined(measured):
    model, statistics, unseen = measured
    dense = copy.deepcopy(model)
    with fitted(model, hf_wsvd.WSVDConfig(1.0), statistics):
        assert divergence(dense, model, unseen).kl == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_refined_through_fp32_masters(dtype, dense):
    model = copy.deepcopy(dense("llama")).to(dtype)
    statistics = hf_wsvd.collect_statistics(model, batches("llama", range(100, 103)))
    with fitted(model, config(), statistics) as fit:
        assert fit.info["refinement_kl"]["after"] < fit.info["refinement_kl"]["before"]
        assert model.model.layers[0].self_attn.k_proj.weight.dtype == dtype


def test_statistics_without_answers_are_refused(dense):
    statistics = hf_wsvd.collect_statistics(dense("llama"), batches("llama", range(2)), keep_answers=False)
    with (
        pytest.raises(ValueError, match="keep_answers=True, or choose refinement"),
        fitted(dense("llama"), config(), statistics),
    ):
        pass


def test_answers_count_text_alone(dense):
    batch = tiny_models.prompt("llava")
    counted = answers.counted_positions(batch, answers.placeholder_ids(dense("llava")))
    assert counted.tolist() == [[True, False, False, False, False] + [True] * 6]  # image tokens stand at 2 to 5


def test_groups_hold_the_same_rows_padded_to_the_right():
    rows = [tiny_models.prompt("llava", batch=1, tokens=tokens, seed=tokens) for tokens in (10, 12, 8)]
    together, last = map(grouping.joined, grouping.groups_of(rows, max_tokens=24))
    assert together["input_ids"].shape == (2, 12)
    assert together["attention_mask"].sum(1).tolist() == [10, 12]
    assert torch.equal(together["input_ids"][0, :10], rows[0]["input_ids"][0])
    assert torch.equal(together["pixel_values"][1], rows[1]["pixel_values"][0])
    assert last is rows[2]


def test_batches_of_other_columns_are_not_joined():
    text = {name: value for name, value in tiny_models.prompt("llava").items() if name != "pixel_values"}
    assert len(list(grouping.groups_of([tiny_models.prompt("llava"), text], max_tokens=1024))) == 2
