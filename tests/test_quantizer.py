"""Compression in memory: while loading, of a loaded model, half-way, undone."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from model_facts import auto_class, logits, own_hooks, projections
from tiny_models import CLOSED_FORM, FAMILIES, calibration_batches, prompt
from transformers import AutoModelForCausalLM

import hf_wsvd
from hf_wsvd import WSVDConfig


LOADED_FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "llava", "qwen2_vl", "smolvlm"]


# While loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LOADED_FAMILIES)
def test_loading_a_dense_checkpoint_with_a_config_equals_compress(family, dense, tmp_path):
    dense(family).save_pretrained(tmp_path)
    config = WSVDConfig(calibration=calibration_batches(family), **CLOSED_FORM)
    loaded = auto_class(family).from_pretrained(tmp_path, quantization_config=config)
    in_memory = hf_wsvd.compress(copy.deepcopy(dense(family)), config)
    assert projections(loaded) == {f"{layer}.{side}": 8 for layer in range(3) for side in "kv"}
    assert loaded.config.quantization_config == in_memory.config.quantization_config
    assert torch.equal(logits(loaded, family), logits(in_memory, family))
    assert not loaded.training
    assert config.calibration is not None, "the caller's config can be used again"
    assert config.key_layout is None


def test_a_sharded_dense_checkpoint_in_bfloat16_is_compressed_in_bfloat16(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    config = WSVDConfig(calibration=calibration_batches("llama"), **CLOSED_FORM)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    hf_wsvd.compress(reference, config)
    assert torch.equal(logits(model, "llama"), logits(reference, "llama"))


def test_the_calibration_data_are_released_after_the_fit(dense):
    class Batches(list):
        """A list that can be watched."""

    data = Batches(calibration_batches("llama"))
    model = hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(calibration=data, refinement_steps=2))
    watched = weakref.ref(data)
    del data
    gc.collect()
    assert watched() is None
    assert model.config.quantization_config.calibration is None


# A loaded model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_is_the_dense_model(family, dense, compressed):
    torch.testing.assert_close(logits(compressed(family, 1), family), logits(dense(family), family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_records_what_was_done(family, compressed):
    model = compressed(family, k_rank=4, v_rank_ratio=0.75)
    config = model.config.quantization_config
    assert model.hf_quantizer.quantization_config == config
    assert (config.k_rank, config.v_rank) == ([4] * 3, [12] * 3)
    assert config.calibration_info["tokens"] == 128
    assert config.decoder_shape["num_hidden_layers"] == 3
    norm = "before" if family == "qwen3" else "none"
    assert config.key_layout == [f"{norm}:halves"] * 3


def test_more_calibrated_rank_is_a_smaller_error(dense, compressed):
    exact = logits(dense("llama"), "llama")
    errors = [
        (logits(compressed("llama", ratio, rank_multiple=1), "llama") - exact).norm() for ratio in (0.25, 0.5, 0.75)
    ]
    assert errors[0] > errors[1] > errors[2] > 0


def test_collected_statistics_serve_several_ratios(dense, statistics):
    config = WSVDConfig(**CLOSED_FORM)
    direct = hf_wsvd.compress(copy.deepcopy(dense("llama")), config, calibration=calibration_batches("llama"))
    reused = hf_wsvd.compress(copy.deepcopy(dense("llama")), config, statistics=statistics("llama"))
    assert torch.equal(logits(direct, "llama"), logits(reused, "llama"))
    assert direct.config.quantization_config == reused.config.quantization_config


def test_compressing_twice_is_refused_and_changes_nothing(compressed):
    model = compressed("llama")
    before = logits(model, "llama")
    with pytest.raises(ValueError, match=r"quantized already.*wsvd"):
        hf_wsvd.compress(model, calibration=calibration_batches("llama"))
    assert torch.equal(logits(model, "llama"), before)


@pytest.mark.parametrize("training", [True, False])
def test_compression_keeps_the_mode_of_every_module(dense, training):
    model = copy.deepcopy(dense("llama")).train(training)
    model.model.layers[1].train(not training)
    hf_wsvd.compress(model, WSVDConfig(refinement_steps=2), calibration=calibration_batches("llama"))
    modes = {name: module.training for name, module in model.named_modules() if "_proj" not in name}
    assert modes == {name: training is not name.startswith("model.layers.1") for name in modes}


# Half-way -----------------------------------------------------------------------------------------------------------


HALF_WAY = {
    "only values": ({"rank_ratio": None, "v_rank": 4}, {"k": [16, 16, 16], "v": [4, 4, 4]}),
    "keys by name": ({"modules_to_not_convert": ("v_proj",)}, {"k": [8, 8, 8], "v": [16, 16, 16]}),
    "one layer less": ({"layers_to_not_convert": (1,)}, {"k": [8, None, 8], "v": [8, None, 8]}),
    "one module less": ({"modules_to_not_convert": ("layers.0.self_attn.k_proj",)}, {"k": [16, 8, 8], "v": [8] * 3}),
    "one attention less": ({"modules_to_not_convert": ("layers.2",)}, {"k": [8, 8, None], "v": [8, 8, None]}),
    "by list": (
        {"k_rank": (3, None, 16), "v_rank": (None, None, 1)},
        {"k": [3, None, 16], "v": [16, None, 1]},
    ),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "llava"])
@pytest.mark.parametrize("case", HALF_WAY)
def test_what_is_left_alone_stays_dense_and_a_lone_half_takes_full_rank(family, case, compressed, merged):
    options, ranks = HALF_WAY[case]
    model = compressed(family, **{"rank_ratio": 0.5, **options})
    wanted = {f"{layer}.{side}": ranks[side][layer] for side in "kv" for layer in range(3)}
    assert projections(model) == wanted
    plain = merged(family, **{"rank_ratio": 0.5, **options})
    generated = [m.generate(**prompt(family), max_new_tokens=6, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)


def test_vision_towers_are_never_touched(dense, compressed):
    for family in ("llava", "smolvlm"):
        before, after = (
            {n: p for n, p in m.state_dict().items() if "vision" in n} for m in (dense(family), compressed(family))
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


# Undone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantize_gives_a_plain_model_with_the_same_function(family, dense, compressed):
    model = copy.deepcopy(compressed(family)).dequantize()
    torch.testing.assert_close(logits(model, family), logits(compressed(family), family), rtol=0, atol=2e-4)
    assert {type(m) for m in model.modules()} == {type(m) for m in dense(family).modules()}
    assert (own_hooks(compressed(family)) > 0, own_hooks(model)) == (True, 0)
    assert model.state_dict().keys() == dense(family).state_dict().keys()
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    assert model.get_decoder().config._attn_implementation == dense(family).get_decoder().config._attn_implementation


def test_dequantize_multiplies_the_factors_in_fp32(compressed):
    projection = compressed("qwen2").model.layers[1].self_attn.v_proj
    dense_layer = projection.merged()
    x = torch.randn(2, 5, projection.in_features)
    torch.testing.assert_close(dense_layer(x), projection(x), rtol=0, atol=1e-5)
    assert torch.equal(dense_layer.bias, projection.bias)


def test_dequantize_then_compress_again(compressed):
    """Weights of the rank that they are cut to lose nothing."""
    model = copy.deepcopy(compressed("llama")).dequantize()
    hf_wsvd.compress(model, WSVDConfig(**CLOSED_FORM), calibration=calibration_batches("llama"))
    torch.testing.assert_close(logits(model, "llama"), logits(compressed("llama"), "llama"), rtol=0, atol=2e-4)
