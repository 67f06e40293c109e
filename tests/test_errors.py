"""Models, configurations and calibration data that do not fit: one clear error each."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
import transformers
from tiny_models import calibration_batches, prompt
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_wsvd
from hf_wsvd import WSVDConfig


# Models that cannot be compressed -----------------------------------------------------------------------------------


def gpt2() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))


def gpt_neox() -> PreTrainedModel:
    config = transformers.GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.GPTNeoXForCausalLM(config)


def t5() -> PreTrainedModel:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64)
    )


def bert() -> PreTrainedModel:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.BertModel(config)


def clip_vision() -> PreTrainedModel:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**tiny_models.VISION))


UNSUPPORTED = {
    gpt2: "GPT2LMHeadModel has no layer to convert.*separate `k_proj` and `v_proj`",
    gpt_neox: "GPTNeoXForCausalLM has no layer to convert.*separate `k_proj` and `v_proj`",
    t5: "T5ForConditionalGeneration is an encoder-decoder model",
    bert: "BertModel has no layer to convert",
    clip_vision: "CLIPVisionModel",
}


@pytest.mark.parametrize("build", UNSUPPORTED, ids=lambda f: f.__name__)
def test_a_model_without_convertible_layers_is_refused_by_name(build):
    model = build()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=UNSUPPORTED[build]):
        hf_wsvd.compress(model, calibration=[{"input_ids": torch.arange(8)[None]}])
    assert [name for name, _ in model.named_modules()] == names
    assert getattr(model, "hf_quantizer", None) is None


def test_a_config_that_leaves_out_every_layer_is_refused(dense):
    for options in (
        {"layers_to_not_convert": [0, 1, 2]},
        {"rank_ratio": None},
        {"modules_to_not_convert": ["layers"]},
    ):
        with pytest.raises(ValueError, match=r"no layer to convert.*leave out all of its 3 attention layers"):
            hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(**options), calibration=prompt("llama"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_rank": 17}, r"k_rank=17 .*1 to head_dim = 16 \(layer 0\)"),
        ({"v_rank": [8, 8, 99]}, r"v_rank=99 .*1 to head_dim = 16 \(layer 2\)"),
        ({"k_rank": [8, 8]}, r"k_rank='a list of 2'.*a list of 3"),
        ({"rank_ratio": [0.5] * 4}, r"rank_ratio='a list of 4'.*a list of 3"),
        ({"layers_to_not_convert": [3]}, r"layers_to_not_convert=3 .*0 to 2"),
    ],
)
def test_ranks_that_do_not_fit_the_model_are_refused_before_calibration(dense, options, message):
    def batches():
        raise AssertionError("calibration began")
        yield

    with pytest.raises(ValueError, match=message):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(**options), calibration=batches())


def test_what_is_no_model_or_no_config_is_refused(dense):
    with pytest.raises(ValueError, match="model must be a loaded transformers model, got str"):
        hf_wsvd.compress("meta-llama/Llama-3.2-1B")
    for config, kind in (({"k_rank": 4}, "dict"), (0.5, "float")):
        with pytest.raises(ValueError, match=f"config must be a WSVDConfig, got {kind}"):
            hf_wsvd.compress(dense("llama"), config, calibration=prompt("llama"))


# Loading a dense checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
def test_ranks_that_do_not_fit_are_refused_before_weights_are_read(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="k_rank=99"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=WSVDConfig(k_rank=99))


@pytest.mark.usefixtures("no_weights")
def test_a_load_split_over_processes_is_refused_before_weights_are_read(dense, compressed, tmp_path):
    for folder, model, options in (
        ("dense", dense("llama"), {"quantization_config": WSVDConfig()}),
        ("compressed", compressed("llama"), {}),
    ):
        model.save_pretrained(tmp_path / folder)
        config = AutoConfig.from_pretrained(tmp_path / folder)
        config.distributed_config = DistributedConfig(tp_size=2)
        with pytest.raises(ValueError, match=r"split over processes \({'tp_size': 2}\); use device_map"):
            AutoModelForCausalLM.from_pretrained(tmp_path / folder, config=config, **options)


def test_a_dense_checkpoint_without_tokenizer_asks_for_calibration_data(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs a tokenizer.*Pass calibration="):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=WSVDConfig())


def test_a_dense_model_with_offloaded_layers_is_refused_with_the_remedy(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    config = WSVDConfig(calibration=calibration_batches("llama"))
    with pytest.raises(ValueError, match=r"k_proj is offloaded.*load the compressed checkpoint with offloading"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=config,
            device_map={**places, "lm_head": "cpu"},
            offload_folder=tmp_path / "o",
        )


# Calibration data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "empty"),
        (iter(()), "empty"),
        (3, "int"),
        (b"some text", "bytes"),
        (["some text"], "batch 0 must be a dict of tensors, got str"),
        ([{"text": "hello", "label": 1}], "input_ids or inputs_embeds; columns found: text, label"),
        ([{"input_ids": [1, 2, 3]}], "must be a tensor, got list"),
        ([{"input_ids": torch.ones(1, 4)}], "dtype int64 or int32"),
        ([{"input_ids": torch.zeros(1, 0, dtype=torch.long)}], "not empty"),
        ([{"input_ids": torch.tensor([[1, 128]])}], "ids from 0 to 127"),
        ([{"input_ids": torch.tensor([[1, -1]])}], "ids from 0 to 127"),
        ([{"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 5)}], "attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calibration_data_of_the_wrong_form_are_refused(dense, batches, message):
    with pytest.raises(ValueError, match=message):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), calibration=batches)


def test_activations_that_are_not_finite_are_refused_with_the_module(dense):
    model = copy.deepcopy(dense("llama"))
    model.model.embed_tokens.weight.data[5] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.k_proj are not finite"):
        hf_wsvd.compress(model, calibration=[{"input_ids": torch.tensor([[3, 4, 5]])}])


def test_a_weight_that_is_not_finite_is_refused_with_its_name(dense):
    model = copy.deepcopy(dense("llama"))
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"layers\.(1\.self_attn\.v_proj|2\.self_attn\.k_proj)"):
        hf_wsvd.compress(model, calibration=calibration_batches("llama"))
