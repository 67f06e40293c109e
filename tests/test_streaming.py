"""Compression while a dense checkpoint loads: the same model as in process, one dense weight in memory at a time."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny_models
import torch
from model_facts import auto_class, hooks, logits, projections
from safetensors.torch import load_file, save_file
from tiny_models import calibration_batches, prompt
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import hf_wsvd
from hf_wsvd import WSVDConfig
from hf_wsvd.calibration import Statistics
from hf_wsvd.fit import Plan
from hf_wsvd.self_check import self_check_of
from hf_wsvd.streaming import Streaming


STREAMED_FAMILIES = ["llama", "qwen2", "llava", "qwen2_vl"]
UNIFORM = {"rank_allocation": "uniform", "refinement": "none"}


@cache
def _measured(family: str, dtype: torch.dtype = torch.float32) -> Statistics:
    model = tiny_models.build(family).to(dtype)
    return hf_wsvd.collect_statistics(model, calibration_batches(family), fisher=True)


@pytest.fixture(scope="module")
def measured() -> Callable[[str], Statistics]:
    """`measured(family)`: statistics of `dense(family)` with Fisher information. Shared: copy before changing them."""
    return _measured


@pytest.fixture(scope="module")
def folder(dense, tmp_path_factory) -> Callable[..., Path]:
    """`folder(family, sharded=False)`: the checkpoint of `dense(family)`."""

    @cache
    def saved(family: str, sharded: bool = False) -> Path:
        path = tmp_path_factory.mktemp(family)
        dense(family).save_pretrained(path, **({"max_shard_size": "20KB"} if sharded else {}))
        assert (len(list(path.glob("*.safetensors"))) > 3) is sharded
        return path

    return saved


def streamed(folder: Path, family: str, config: WSVDConfig, **options) -> PreTrainedModel:
    return auto_class(family).from_pretrained(folder, quantization_config=config, **options)


def assert_same_model(one: PreTrainedModel, other: PreTrainedModel) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert list(mine) == list(others)
    for name, tensor in mine.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name
    assert one.config.quantization_config == other.config.quantization_config
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    assert hooks(one) == hooks(other)


# The same model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", STREAMED_FAMILIES)
def test_the_result_is_that_of_compressing_in_process(family, sharded, dtype, folder, measured):
    statistics = measured(family, dtype)
    config = WSVDConfig(calibration=statistics, refinement_steps=3)
    options = {"dtype": dtype, "device_map": "cpu" if sharded else None}
    loaded = streamed(folder(family, sharded), family, config, **options)
    dense = auto_class(family).from_pretrained(folder(family), dtype=dtype)
    in_process = hf_wsvd.compress(dense, config, statistics=statistics)
    assert_same_model(loaded, in_process)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert len(set(projections(loaded).values())) > 1, "ranks were allocated"
    assert not loaded.training
    assert config.calibration is statistics, "the caller's config can be used again"
    inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in prompt(family).items()}
    cached, uncached = (
        loaded.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert dtype != torch.float32 or torch.equal(cached, uncached)


OPTIONS = {
    **{f"{method} {refinement}": {"method": method, "refinement": refinement, "refinement_steps": 3}
       for method in ("svd", "asvd", "svd_llm", "wsvd") for refinement in ("none", "fisher", "distillation")},
    "queries": {"q_rank_ratio": 0.5, "refinement": "fisher"},
    "all whole": {"rank_ratio": 1},
    "values alone": {"rank_ratio": None, "v_rank": 4},
    "by list": {"k_rank": [3, None, 16], "v_rank": [None, None, 1]},
    "by ratio": {"k_rank_ratio": 0.5, "v_rank_ratio": 0.75},
    "by name": {"modules_to_not_convert": ["layers.1", "layers.2.self_attn.v_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_every_method_refinement_and_choice_of_ranks_streams(case, folder, measured):
    config = WSVDConfig(**{"refinement_steps": 2} | OPTIONS[case])
    loaded = streamed(folder("qwen2"), "qwen2", WSVDConfig(**vars(config) | {"calibration": measured("qwen2")}))
    dense = AutoModelForCausalLM.from_pretrained(folder("qwen2"))
    assert_same_model(loaded, hf_wsvd.compress(dense, config, statistics=measured("qwen2")))


def test_a_file_of_statistics_gives_the_same_model_both_ways(folder, measured, tmp_path):
    path = tmp_path / "stats.safetensors"
    hf_wsvd.save_statistics(measured("llama"), path)
    config = WSVDConfig(refinement="none", calibration=path)
    model = streamed(folder("llama"), "llama", config)
    compressed = hf_wsvd.compress(AutoModelForCausalLM.from_pretrained(folder("llama")), config)
    assert_same_model(model, compressed)
    assert self_check_of(model).source == "calibration"


def test_statistics_in_another_dtype_are_refused(folder, measured, no_weights):
    with pytest.raises(ValueError, match="measured in float32, the model is bfloat16: calibrate again"):
        streamed(folder("llama"), "llama", WSVDConfig(calibration=measured("llama")), dtype=torch.bfloat16)


def test_compress_takes_statistics_as_calibration(dense, measured):
    one = hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(**UNIFORM), calibration=measured("llama"))
    other = hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(**UNIFORM), statistics=measured("llama"))
    assert_same_model(one, other)


def test_device_maps_are_sized_by_what_stays(folder, measured, monkeypatch):
    shares = []

    def seen(self, name, share=Streaming.share):
        shares.append(share(self, name))
        return shares[-1]

    monkeypatch.setattr(Streaming, "share", seen)
    config = WSVDConfig(calibration=measured("llama"), v_rank=16, **UNIFORM)
    model = streamed(folder("llama"), "llama", config, device_map="auto")
    assert projections(model)["1.k"] == 8
    assert set(shares) == {1.0, 8 * (48 + 16) / (48 * 16)}


@pytest.mark.parametrize("refinement", ["none", "distillation"])
def test_a_weight_that_passes_the_operation_by_is_factorised_after_the_load(refinement, folder, measured, monkeypatch):
    """transformers asks about the first of several parameters that it makes out of one tensor."""
    config = WSVDConfig(calibration=measured("llama"), refinement=refinement, refinement_steps=2)
    wanted = streamed(folder("llama"), "llama", config)
    monkeypatch.setattr(hf_wsvd.WSVDHfQuantizer, "param_needs_quantization", lambda self, model, name: ".k_" in name)
    assert_same_model(streamed(folder("llama"), "llama", config), wanted)


# Memory -------------------------------------------------------------------------------------------------------------


def dense_storages(shape: tuple[int, ...]) -> set[int]:
    """Addresses of all tensors of this shape that hold memory, garbage that was not collected yet included."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [held for held in gc.get_objects() if type(held) in kinds and held.shape == shape]
    return {tensor.data_ptr() for tensor in tensors if not tensor.is_meta}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_one_dense_weight_is_in_memory_at_a_time(sharded, dense, folder, statistics, monkeypatch):
    shape = dense("llama").model.layers[0].self_attn.k_proj.weight.shape
    path, measured = folder("llama", sharded), statistics("llama")
    before, counts = dense_storages(shape), []

    def counted(self, target, side, rank, linear, projection=Plan.projection):
        counts.append(len(dense_storages(shape) - before))
        return projection(self, target, side, rank, linear)

    monkeypatch.setattr(Plan, "projection", counted)
    model = streamed(path, "llama", WSVDConfig(calibration=measured, **UNIFORM))
    assert counts == [1] * 6
    assert not dense_storages(shape) - before
    for attention in (layer.self_attn for layer in model.model.layers):
        assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (2 * 8, 48)
    assert model.config.quantization_config.calibration is None


def test_the_statistics_are_released_after_the_load(folder, measured):
    own = replace(measured("llama"))
    model = streamed(folder("llama"), "llama", WSVDConfig(calibration=own, **UNIFORM))
    gc.collect()
    assert [held for held in gc.get_referrers(own) if isinstance(held, dict) and "calibration" in held] == []
    assert model.hf_quantizer.get_quantize_ops().streaming is None


# What the model then does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", STREAMED_FAMILIES)
def test_the_model_saves_reloads_verifies_and_dequantizes(family, folder, measured, dense, tmp_path):
    model = streamed(folder(family), family, WSVDConfig(calibration=measured(family), refinement="none"))
    model.save_pretrained(tmp_path)
    again = auto_class(family).from_pretrained(tmp_path)
    assert torch.equal(logits(again, family), logits(model, family))
    assert hf_wsvd.verify(again).passed
    card = hf_wsvd.model_card(model)
    assert "hf_wsvd" in card.data.tags
    plain = model.dequantize()
    torch.testing.assert_close(logits(plain, family), logits(again, family), rtol=0, atol=2e-4)
    assert {type(m) for m in plain.modules()} == {type(m) for m in dense(family).modules()}


def test_the_base_model_is_recorded_in_the_checkpoint_alone(folder, measured, monkeypatch):
    monkeypatch.setattr(hf_wsvd.quantizer, "base_model_on_hub", lambda model: "somebody/dense")
    model = streamed(folder("llama"), "llama", WSVDConfig(calibration=measured("llama"), **UNIFORM))
    assert hf_wsvd.model_card(model).data.base_model == "somebody/dense"
    assert "base_model" not in measured("llama").info


def test_a_causal_checkpoint_streams_into_its_base_model(folder, measured):
    config = WSVDConfig(calibration=measured("llama"), refinement="none")
    base = AutoModel.from_pretrained(folder("llama"), quantization_config=config)
    wanted = streamed(folder("llama"), "llama", config).model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in base.state_dict().items())
    assert self_check_of(base) is None, "it gives no logits"


def test_the_dense_side_of_the_self_check_comes_from_the_statistics(folder, measured, caplog):
    given = measured("llama")
    config = {"refinement": "none"}
    model = streamed(folder("llama"), "llama", WSVDConfig(calibration=given, **config))
    check = self_check_of(model)
    assert check.source == "calibration"
    assert check.dtype == "float32"
    assert all(torch.equal(one.dense, other.dense) for one, other in zip(check.samples, given.samples, strict=True))
    assert not torch.equal(check.samples[0].dense, check.samples[0].compressed)

    model = streamed(folder("llama"), "llama", WSVDConfig(calibration=replace(given, samples=[]), **config))
    assert self_check_of(model).source == "probe", "private samples can be left out"

    logger = logging.get_logger("hf_wsvd")
    logger.addHandler(caplog.handler)
    bare = replace(given, samples=[], probe=None)
    try:
        model = streamed(folder("llama"), "llama", WSVDConfig(calibration=bare, **config))
    finally:
        logger.removeHandler(caplog.handler)
    assert self_check_of(model) is None
    assert "compressed without a self-check: the statistics hold no answers" in caplog.text
    in_process = hf_wsvd.compress(
        AutoModelForCausalLM.from_pretrained(folder("llama")), WSVDConfig(**config), statistics=bare
    )
    assert self_check_of(in_process).source == "probe", "a dense model at hand is asked"


# What does not fit --------------------------------------------------------------------------------------------------


def test_statistics_of_other_weights_end_the_load_at_the_first_one(dense, folder, measured, monkeypatch):
    taken = []

    def seen(self, name, weight, take=Streaming.take):
        taken.append(name)
        return take(self, name, weight)

    monkeypatch.setattr(Streaming, "take", seen)
    other = hf_wsvd.collect_statistics(tiny_models.build("llama", seed=9), calibration_batches("llama"))
    with pytest.raises(ValueError, match=r"do not fit model\.layers\.0\.self_attn\.k_proj: its weights are others"):
        streamed(folder("llama"), "llama", WSVDConfig(calibration=other))
    assert taken == ["model.layers.0.self_attn.k_proj.weight"]
    # Nothing is left of it.
    dense_again = AutoModelForCausalLM.from_pretrained(folder("llama"))
    assert torch.equal(logits(dense_again, "llama"), logits(dense("llama"), "llama"))
    model = streamed(folder("llama"), "llama", WSVDConfig(calibration=measured("llama"), **UNIFORM))
    assert projections(model)["2.v"] == 8


def test_a_weight_that_is_not_finite_is_named(folder, measured, tmp_path):
    tensors = load_file(folder("llama") / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder("llama") / "config.json").read_bytes())
    for changed in (float("nan"), 1e4):
        tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = changed
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ValueError, match=r"model\.layers\.1\.self_attn\.v_proj: (the weight holds NaN|its weights)"
        ):
            streamed(tmp_path, "llama", WSVDConfig(calibration=measured("llama"), **UNIFORM))


def test_a_weight_that_is_missing_is_named(folder, measured, tmp_path):
    tensors = load_file(folder("llama") / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder("llama") / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"do not fit model\.layers\.1\.self_attn\.v_proj: its weights are others"):
        streamed(tmp_path, "llama", WSVDConfig(calibration=measured("llama"), **UNIFORM))


LACKING = {
    "answers": ({"answered": []}, {}, "distillation.*needs the dense model's answers"),
    "Fisher information": ({"fisher": {}}, {"refinement": "fisher"}, "needs the element-wise Fisher information"),
    "gradients": ({"gradient": {}}, {}, r"no gradients of model\.layers\.0\.self_attn\.k_proj"),
    "layers": ({"gram": {}}, {}, r"do not fit model\.layers\.0\.self_attn\.k_proj.*no such layer"),
}


@pytest.mark.parametrize("case", LACKING)
def test_statistics_that_lack_something_are_refused_before_any_weight_is_read(case, folder, measured, no_weights):
    missing, options, message = LACKING[case]
    with pytest.raises(ValueError, match=message):
        streamed(folder("llama"), "llama", WSVDConfig(calibration=replace(measured("llama"), **missing), **options))


def test_statistics_of_another_architecture_are_refused_before_any_weight_is_read(folder, measured, no_weights):
    for other, held in (("llama_mha", r"num_key_value_heads=\[4\]"), ("qwen2_vl", "hidden_size=64")):
        with pytest.raises(ValueError, match=rf"measured on another model.*{held} \(this model"):
            streamed(folder("llama"), "llama", WSVDConfig(calibration=measured(other)))


def test_offloading_is_refused_before_any_weight_is_read(folder, measured, no_weights, tmp_path):
    config = WSVDConfig(calibration=measured("llama"))
    for device in ("disk", 0):
        device_map = {"model": "cpu", "lm_head": device}
        with pytest.raises(ValueError, match="device_map offloads weights"):
            streamed(folder("llama"), "llama", config, device_map=device_map, offload_folder=tmp_path)


def test_a_compressed_checkpoint_is_not_calibrated_again(folder, measured, tmp_path):
    streamed(folder("llama"), "llama", WSVDConfig(calibration=measured("llama"), **UNIFORM)).save_pretrained(tmp_path)
    for calibration in (measured("llama"), calibration_batches("llama")):
        with pytest.raises(ValueError, match="this checkpoint is compressed already"):
            streamed(tmp_path, "llama", WSVDConfig(calibration=calibration))
