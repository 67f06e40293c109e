"""`WSVDConfig.cache`: models whose own caches are packed, compressed or not, in memory and in checkpoints."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from tiny_models import CLOSED_FORM, prompt

import hf_wsvd
from hf_wsvd import CacheConfig, WSVDCache, WSVDConfig, compress
from hf_wsvd.cache_layers import GrowingLayer
from hf_wsvd.cli.inspect import describe, text
from hf_wsvd.compat import CACHE_ARGUMENT, cache_of_output
from hf_wsvd.latent_layers import LatentDynamicLayer


EIGHT_BITS = CacheConfig(bits=8)


def generated(model, **kwargs):
    inputs = prompt("llama", batch=2)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **kwargs)


@pytest.fixture(scope="module")
def dense_folder(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    dense("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(dense_folder):
    config = WSVDConfig(rank_ratio=None, cache=EIGHT_BITS)
    return transformers.AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config)


@pytest.fixture(scope="module")
def latent(dense, statistics):
    config = WSVDConfig(rank_ratio=0.5, cache=EIGHT_BITS, **CLOSED_FORM)
    return compress(copy.deepcopy(dense("llama")), config, statistics=statistics("llama"))


def test_a_model_without_ranks_packs_keys_and_values_of_every_cache(packed, dense):
    output = generated(packed)
    layers = cache_of_output(output).layers
    assert {(type(layer), layer.storage.key.bits, layer.storage.value.bits) for layer in layers} == {
        (GrowingLayer, 8, 8)
    }
    explicit = generated(dense("llama"), **{CACHE_ARGUMENT: WSVDCache(dense("llama"), bits=8)})
    assert torch.equal(output.sequences, explicit.sequences)
    bare = packed(**prompt("llama"), use_cache=True)
    assert all(type(layer) is GrowingLayer for layer in cache_of_output(bare).layers)
    assert cache_of_output(packed(**prompt("llama"), use_cache=False)) is None


def test_a_compressed_model_packs_latents(latent):
    layers = cache_of_output(generated(latent)).layers
    assert {(type(layer), layer.storage.key.scheme) for layer in layers} == {(LatentDynamicLayer, "minmax")}
    assert WSVDCache(latent).cache_config == EIGHT_BITS
    assert WSVDCache(latent, bits=4).cache_config == CacheConfig(bits=4)


@pytest.mark.parametrize("kind", ["packed", "latent"])
def test_a_checkpoint_keeps_the_storage_and_a_load_may_change_it(kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["cache"] == {"bits": 8}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(generated(again).sequences, generated(model).sequences)
    other = WSVDConfig(cache={"bits": 4})
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=other)
    assert {layer.storage.key.bits for layer in cache_of_output(generated(changed)).layers} == {4}


def test_fixed_size_caches_are_packed_too(packed, latent):
    for model in (packed, latent):
        output = generated(model, cache_implementation="static", disable_compile=True)
        assert all(layer.storage.key.bits == 8 for layer in cache_of_output(output).layers)
        assert torch.equal(output.sequences, generated(model).sequences)


def test_dequantized_models_make_ordinary_caches(packed, latent):
    for model in (packed, latent):
        plain = copy.deepcopy(model).dequantize()
        assert type(cache_of_output(generated(plain)).layers[0]) is transformers.cache_utils.DynamicLayer


def test_the_self_check_is_of_the_weights_alone(latent, tmp_path):
    latent.save_pretrained(tmp_path)
    coarse = WSVDConfig(cache={"bits": 2})
    assert hf_wsvd.verify(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=coarse)
    ).passed


@pytest.mark.parametrize("kind", ["packed", "latent"])
def test_card_and_inspect_tell_how_the_cache_is_packed(kind, request, tmp_path):
    model = request.getfixturevalue(kind)
    card = hf_wsvd.model_card(model).text
    assert 'Packed as `{"bits": 8}`; bytes at 4,096 tokens.' in card
    assert ("Ranks, of 16" in card) == (kind == "latent")
    assert ("loading fails without it" in card) == (kind == "latent")
    model.save_pretrained(tmp_path)
    description = describe(str(tmp_path))
    bits = {"packed": 8 * (1 + 2 / 16), "latent": 4 * (1 + 2 / 8) + 32 * 16 / (3 * 2 * 2 * 16)}[kind]
    assert description["packed_cache"]["share_of_dense"] == pytest.approx(bits / 32, rel=0.01)
    assert 'packed as {"bits": 8}' in text(description)


def test_storage_that_does_not_fit_is_refused_before_anything_is_packed(dense_folder):
    for cache, message in (({"bits": 4, "layers": {9: {"bits": 8}}}, "layers"), ({"skip_layers": [3]}, "skip_layers")):
        config = WSVDConfig(rank_ratio=None, cache={"bits": 8, **cache})
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(dense_folder, quantization_config=config)


def test_data_without_a_rank_to_fit_are_refused(dense):
    with pytest.raises(ValueError, match="gives no rank to fit"):
        compress(
            copy.deepcopy(dense("llama")), WSVDConfig(rank_ratio=None, cache=EIGHT_BITS), calibration=[prompt("llama")]
        )


def test_neither_ranks_nor_storage_is_refused(dense):
    with pytest.raises(ValueError, match="no layer to convert"):
        compress(copy.deepcopy(dense("llama")), WSVDConfig(rank_ratio=None))


def test_a_decoder_without_a_cache_argument_is_refused():
    config = transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    model = transformers.OpenAIGPTLMHeadModel(config)
    with pytest.raises(ValueError, match="forward takes no"):
        compress(model, WSVDConfig(rank_ratio=None, cache=EIGHT_BITS))
