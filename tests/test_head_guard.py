"""Guarded heads in a model: chosen at the fit, kept by its caches, saved, loaded, shown and dropped."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from tiny_models import CLOSED_FORM, IMAGE_TOKEN, build, calibration_batches, prompt
from tiny_vision import tiny_llava, tiny_processor, tiny_questions
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, pipeline

from hf_wsvd import (
    CacheConfig,
    WSVDCache,
    WSVDConfig,
    cache_nbytes,
    compress,
    load_calibration,
    save_statistics,
    select_heads,
    verify,
)
from hf_wsvd.card import model_card
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.decoder import decoder_attentions, decoder_of, key_value_heads
from hf_wsvd.quantizer_config import GuardMap, HeadGuardConfig


AUTO = {"llama": AutoModelForCausalLM, "llava": AutoModelForImageTextToText, "qwen2_vl": AutoModelForImageTextToText}
FAMILIES = list(AUTO)
# A selector that any model has: gradients of the prompt's loss.
GUARD = {"fraction": 0.34, "selector": "output_only"}


def labelled_batches(family: str) -> list[dict[str, torch.Tensor]]:
    """Calibration data whose last three tokens are the answer."""
    batches = []
    for batch in calibration_batches(family):
        labels = batch["input_ids"].clone()
        labels[:, :-3] = -100
        batches.append({**batch, "labels": labels})
    return batches


def config_of(rank_ratio: float | None = None, cache: CacheConfig | None = None, **guard) -> WSVDConfig:
    head_guard = HeadGuardConfig(**{**GUARD, **guard})
    return WSVDConfig(rank_ratio, cache=cache or CacheConfig(bits=2), head_guard=head_guard, **CLOSED_FORM)


def guarded(family: str, rank_ratio: float | None = None, **options):
    return compress(build(family), config_of(rank_ratio, **options), calibration=labelled_batches(family))


def some_map(family: str, **fields) -> GuardMap:
    """Head 1 of layer 0 and both of layer 2: one head of a layer, none, and all."""
    fields = {"key": {0: {1: 16}, 2: {0: 16, 1: 16}}, "tokens": "all" if family == "llama" else "image", **fields}
    return GuardMap(num_key_value_heads=key_value_heads(build(family)), **fields)


@torch.no_grad()
def answers(model, family: str, cache=None) -> tuple[torch.Tensor, object]:
    """Logits of a prompt and of eight tokens after it, and the cache."""
    inputs = prompt(family)
    cache = DynamicCache(config=decoder_of(model).config) if cache is None else cache
    out = model.generate(
        **inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(out.logits), cache


def used(cache: WSVDCache) -> int:
    """Bytes that hold keys and values, without room to grow and what all stores share."""
    pieces = (piece for layer in cache.layers for store in layer.stores() for piece in store.pieces())
    return sum(piece.used for piece in pieces if piece.kind != "constants")


# At the fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fit_chooses_heads_and_the_models_caches_guard_them(family, rank_ratio):
    model = guarded(family, rank_ratio, protect="kv")
    config = model.config.quantization_config
    guard_map = config.head_guard.guard_map
    assert len({(guard.layer, guard.head) for guard in guard_map}) == round(0.34 * 6)
    assert guard_map.key == guard_map.value
    assert guard_map.tokens == ("all" if family == "llama" else "image")
    assert guard_map.info["calibration"]["samples"] == 8
    own, cache = answers(model, family)
    asked, other = answers(model, family, WSVDCache(model, cache_config=config.storage))
    assert torch.equal(own, asked)
    assert cache_nbytes(cache) == other.nbytes
    plain = dataclasses.replace(config.cache, text_bits=None if family == "llama" else 16)
    assert used(other) > used(answers(model, family, WSVDCache(model, cache_config=plain))[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_guarded_heads_are_those_of_the_dense_model_bit_for_bit_and_no_others(family):
    guard = {"guard_map": some_map(family)}
    dense, model = build(family), compress(build(family), config_of(**guard))
    inputs = prompt(family)
    caches = [DynamicCache(config=decoder_of(dense).config) for _ in range(2)]
    with torch.no_grad():
        for each, cache in zip((dense, model), caches):
            each(**inputs, **{CACHE_ARGUMENT: cache}, use_cache=True)
    ids = inputs["input_ids"][0]
    place = torch.ones_like(ids, dtype=torch.bool) if family == "llama" else ids == IMAGE_TOKEN
    exact, kept = (cache.layers for cache in caches)
    for layer in range(3):
        for head in range(exact[layer].keys.shape[1]):
            same = torch.equal(exact[layer].keys[0, head, place], kept[layer].keys[0, head, place])
            assert same == (head in model.config.quantization_config.guard_map.key.get(layer, {}))
        assert not torch.equal(exact[layer].values[0, :, place], kept[layer].values[0, :, place])
        if family != "llama":
            assert torch.equal(exact[layer].keys[0, :, ~place], kept[layer].keys[0, :, ~place])


def test_scores_may_be_those_of_the_dense_model():
    dense = guarded("llama").config.quantization_config.guard_map
    before = guarded("llama", 0.25, scores_on="dense").config.quantization_config.guard_map
    after = guarded("llama", 0.25).config.quantization_config.guard_map
    assert before.scores == dense.scores
    assert after.scores != dense.scores


def test_data_may_be_an_iterator_although_they_are_read_twice():
    once = compress(build("llama"), config_of(0.5), calibration=iter(labelled_batches("llama")))
    again = guarded("llama", 0.5)
    assert once.config.quantization_config == again.config.quantization_config


def test_selectors_that_measure_nothing_go_with_statistics(statistics):
    config = config_of(0.5, selector="random", seed=3)
    model = compress(build("llama"), config, statistics=statistics("llama"))
    assert model.config.quantization_config.guard_map.selector == "random"
    assert config.head_guard.guard_map is None  # the caller's config stays as it was


def test_no_data_are_needed_for_a_finished_map():
    model = compress(build("llama"), config_of(guard_map=some_map("llama")))
    assert model.config.quantization_config.guard_map == some_map("llama")


# Saved and loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_with_the_same_guards_bytes_and_answers(family, rank_ratio, tmp_path):
    model = guarded(family, rank_ratio)
    model.save_pretrained(tmp_path)
    again = AUTO[family].from_pretrained(tmp_path)
    again.generation_config = model.generation_config
    assert again.config.quantization_config == model.config.quantization_config
    (expected, first), (found, second) = answers(model, family), answers(again, family)
    torch.testing.assert_close(expected, found, atol=1e-3, rtol=0)  # loaded weights lie elsewhere in memory
    assert cache_nbytes(first) == cache_nbytes(second)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["head_guard"]
    assert GuardMap.parse(stored["guard_map"]) == model.config.quantization_config.guard_map
    if rank_ratio is not None:
        assert verify(again).passed


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
def test_a_dense_checkpoint_is_guarded_while_it_loads(rank_ratio, tmp_path):
    build("llava").save_pretrained(tmp_path)
    config = config_of(rank_ratio)
    config.calibration = labelled_batches("llava")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=config)
    held = guarded("llava", rank_ratio).config.quantization_config
    assert loaded.config.quantization_config.guard_map == held.guard_map


def test_generation_and_pipelines_go_on_as_before():
    model, processor = tiny_llava(), tiny_processor()
    data = load_calibration(list(tiny_questions()), processor, preset="question")
    compress(model, config_of(selector="headguard", cache=CacheConfig(bits=4)), calibration=data)
    ask = pipeline("image-text-to-text", model=model, processor=processor)
    row = tiny_questions(1)[0]
    content = [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["question"]}]
    chat = [{"role": "user", "content": content}]
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    assert ask(text=chat, generate_kwargs=beams)[0]["generated_text"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a guarded llama, to be copied."""
    folder = tmp_path_factory.mktemp("guarded")
    guarded("llama", 0.5).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A folder of a guarded llama."""
    return shutil.copytree(saved, tmp_path / "guarded")


def test_another_cache_at_load_keeps_the_checkpoints_guards(checkpoint):
    given = WSVDConfig(cache=CacheConfig(bits=4))
    config = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=given).config.quantization_config
    assert config.storage.bits == 4
    assert len(config.guard_map) == 2


def test_other_guards_may_be_given_at_load(checkpoint):
    given = WSVDConfig(cache=CacheConfig(bits=4), head_guard=HeadGuardConfig(guard_map=some_map("llama")))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=given)
    assert model.config.quantization_config.guard_map == some_map("llama")
    in_cache = WSVDConfig(cache=CacheConfig(bits=4, guard_map=some_map("llama")))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=in_cache)
    assert model.config.quantization_config.head_guard is None
    assert model.config.quantization_config.guard_map == some_map("llama")


@pytest.mark.parametrize("field", ["head_guard", "cache"])
def test_a_map_of_another_model_fails_before_weights_are_read(checkpoint, no_weights, field):
    other = GuardMap(key={7: {0: 16}}, num_key_value_heads=[2] * 8, tokens="all")
    guard = HeadGuardConfig(guard_map=other) if field == "head_guard" else None
    cache = CacheConfig(bits=4, guard_map=other if field == "cache" else None)
    given = WSVDConfig(cache=cache, head_guard=guard)
    with pytest.raises(ValueError, match="another model: a decoder of 8 layers of 2 KV heads; LlamaForCausalLM has 3"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=given)


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ({}, "head_guard has no guard_map"),
        ({"rank": "full", "guard_map": some_map("llama")}, "head_guard.rank='full' is not allowed"),
    ],
)
def test_guards_that_a_load_cannot_make_are_refused(checkpoint, no_weights, guard, message):
    given = WSVDConfig(cache=CacheConfig(bits=4), head_guard=HeadGuardConfig(**guard))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=given)


HOSTILE = {
    "no map": {"selector": "headguard"},
    "a path": {"guard_map": "/etc/hostname"},
    "a list": [1],
    "a huge layer": {"guard_map": {"key": {"10000000000000000000": {"0": 16}}, "num_key_value_heads": [2, 2, 2]}},
    "a head too many": {"guard_map": {"key": {"0": {"2": 16}}, "num_key_value_heads": [2, 2, 2]}},
    "many layers": {"guard_map": {"num_key_value_heads": [2] * 5000}},
    "a huge layer width": {"guard_map": {"num_key_value_heads": [10**12, 2, 2]}},
    "odd bits": {"guard_map": {"key": {"0": {"0": 5}}, "num_key_value_heads": [2, 2, 2]}},
    "bits as text": {"guard_map": {"key": {"0": {"0": "16"}}, "num_key_value_heads": [2, 2, 2]}},
    "NaN": {"guard_map": {"num_key_value_heads": [2, 2, 2], "scores": {"key": [[0, float("nan")], [0, 0], [0, 0]]}}},
    "few scores": {"guard_map": {"num_key_value_heads": [2, 2, 2], "scores": {"key": [[0], [0], [0]]}}},
    "a selector of its own": {"guard_map": {"num_key_value_heads": [2, 2, 2], "selector": {"a": 1}}},
    "an unknown field": {"guard_map": {"num_key_value_heads": [2, 2, 2], "code": "x"}},
    "images in a text model": {"guard_map": {"num_key_value_heads": [2, 2, 2], "tokens": "image"}},
    "another decoder": {"guard_map": {"num_key_value_heads": [2, 2]}},
    "a fraction": {"fraction": "all", "guard_map": {"num_key_value_heads": [2, 2, 2], "tokens": "all"}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_config_is_refused_before_weights_are_read(checkpoint, no_weights, kind):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["head_guard"] = HOSTILE[kind]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"(?i)guard"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


# Full rank ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full():
    """Llama at half rank, head 1 of layer 0 and both heads of layer 2 not cut, and the same without guards."""
    data = labelled_batches("llama")
    config = config_of(0.5, rank="full", guard_map=some_map("llama"))
    cut = WSVDConfig(0.5, cache=CacheConfig(bits=2), **CLOSED_FORM)
    return compress(build("llama"), config, calibration=data), compress(build("llama"), cut, calibration=data)


def test_guarded_heads_of_full_rank_are_dense_heads_and_the_others_are_as_without_guards(full):
    dense = build("llama")
    hidden = torch.randn(2, 5, 48)
    for attention, cut, whole in zip(*(decoder_attentions(model) for model in (*full, dense))):
        keys, others, exact = (each.module.k_proj(hidden).unflatten(-1, (2, 16)) for each in (attention, cut, whole))
        for head in range(2):
            held = some_map("llama").key.get(attention.layer, {})
            assert torch.equal(keys[:, :, head], (exact if head in held else others)[:, :, head])
        assert torch.equal(attention.module.v_proj(hidden), cut.module.v_proj(hidden))
    config = full[0].config.quantization_config
    assert (config.k_full_heads, config.v_full_heads) == ([[1], None, [0, 1]], None)
    assert config.k_rank == [8, 8, 8]


def test_heads_that_are_cut_take_no_more_of_the_cache_than_their_rank(full):
    """Keys of 4 heads in all of 8 channels, and of 3 heads 8 more; what is packed takes the same."""
    tokens = {"input_ids": torch.randint(3, 120, (1, 32))}
    sizes = []
    for model in full:
        cache = WSVDCache(model, cache_config=CacheConfig(scheme="bf16"))
        model(**tokens, **{CACHE_ARGUMENT: cache})
        sizes.append(used(cache))
    assert sizes[0] - sizes[1] == 3 * 8 * 32 * 2


@pytest.mark.parametrize("bits", [None, 16, 8, 2])
def test_growing_and_static_caches_agree_on_heads_of_full_rank(full, bits):
    model = full[0]
    config = model.config.quantization_config.storage if bits is None else CacheConfig(bits=bits)
    growing, _ = answers(model, "llama", WSVDCache(model, cache_config=config))
    static, _ = answers(model, "llama", WSVDCache(model, cache_config=config, max_cache_len=32))
    torch.testing.assert_close(growing, static, atol=1e-4, rtol=1e-4)
    if bits == 16:
        merged = copy.deepcopy(model).dequantize()
        torch.testing.assert_close(growing, answers(merged, "llama")[0], atol=1e-4, rtol=1e-4)


def test_heads_of_full_rank_are_saved_and_loaded(full, tmp_path):
    model = full[0]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.generation_config = model.generation_config
    assert torch.equal(answers(model, "llama")[0], answers(again, "llama")[0])
    assert verify(again).passed
    path = tmp_path / "config.json"
    for wrong in ([[1], None], [[7], None, None], "all", [[1, 0], None, None]):
        config = json.loads(path.read_text())
        config["quantization_config"]["k_full_heads"] = wrong
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="full_heads"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_range_of_keys_is_measured_beside_heads_of_full_rank(full):
    config = HeadGuardConfig(selector="key_range", fraction=0.5)
    assert len(select_heads(full[0], labelled_batches("llama"), config)) == 3


def test_a_checkpoint_compressed_while_it_loads_keeps_the_same_heads_whole(full, statistics, tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    save_statistics(statistics("llama"), tmp_path / "stats.safetensors")
    config = config_of(0.5, rank="full", guard_map=some_map("llama"))
    config.calibration = str(tmp_path / "stats.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    held = compress(
        build("llama"), config_of(0.5, rank="full", guard_map=some_map("llama")), statistics=statistics("llama")
    )
    for name, parameter in held.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)
    config.head_guard = HeadGuardConfig(rank="full", selector="random")
    with pytest.raises(ValueError, match="rank='full' needs a guard_map"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)


# Shown and dropped --------------------------------------------------------------------------------------------------


def test_the_card_says_what_is_guarded():
    text = model_card(guarded("llava", fraction=0.5, protect="kv")).text
    assert "3 of 6 KV heads keep 16 bits of their keys and values for tokens of images and videos" in text
    assert "selector `output_only`, fraction 0.5, protect `kv`" in text
    assert "guard_map" not in text


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
def test_dequantize_drops_guards_and_hooks(rank_ratio):
    model = guarded("llava", rank_ratio).dequantize()
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert hooks == []
    answers(model, "llava")


# What is wrong is said ----------------------------------------------------------------------------------------------


def without(name: str, batches: list[dict]) -> list[dict]:
    return [{k: v for k, v in batch.items() if k != name} for batch in batches]


def text_only(family: str) -> list[dict]:
    """Data for a vision-language model in which there is no image."""
    batches = [{k: v for k, v in batch.items() if k in ("input_ids", "labels")} for batch in labelled_batches(family)]
    return [{k: v.masked_fill(v == IMAGE_TOKEN, 5) for k, v in batch.items()} for batch in batches]


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
@pytest.mark.parametrize(
    ("family", "guard", "data", "message"),
    [
        ("llama", {"selector": "image_only"}, labelled_batches, "selector='image_only' needs a model that reads"),
        ("llama", {"selector": "headguard"}, labelled_batches, "allowed: selector='output_only' with tokens='all'"),
        ("llama", {"tokens": "image"}, labelled_batches, "tokens='image' needs a model that reads images"),
        ("llama", {"guard_map": some_map("llava")}, labelled_batches, "LlamaForCausalLM reads none"),
        ("llava", {"guard_map": GuardMap(num_key_value_heads=[2])}, labelled_batches, "made for another model"),
        ("llava", {"selector": "headguard"}, text_only, "no .*image"),
        ("llava", {"selector": "headguard"}, lambda f: without("labels", labelled_batches(f)), "labels"),
    ],
)
def test_what_cannot_be_guarded_is_said_and_the_model_stays(family, guard, data, message, rank_ratio):
    model = build(family)
    before = answers(model, family)[0]
    implementation = decoder_of(model).config._attn_implementation
    calibration = None if rank_ratio is None and "guard_map" in guard else data(family)
    with pytest.raises(ValueError, match=message):
        compress(model, config_of(rank_ratio, **guard), calibration=calibration)
    assert decoder_of(model).config._attn_implementation == implementation
    assert torch.equal(before, answers(model, family)[0])
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, True, "1/8", float("nan")])
def test_a_fraction_outside_of_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"fraction=.* is not allowed; allowed: a number in \(0, 1\]"):
        HeadGuardConfig(fraction=fraction)


@pytest.mark.parametrize("rank_ratio", [None, 0.5])
def test_statistics_hold_nothing_to_measure_heads_on(statistics, rank_ratio):
    with pytest.raises(ValueError, match=r"give data as calibration=, or a guard_map of `hf-wsvd headguard`"):
        compress(build("llama"), config_of(rank_ratio), statistics=statistics("llama"))


def test_statistics_are_refused_before_weights_are_read(statistics, tmp_path, no_weights):
    build("llama").save_pretrained(tmp_path)
    config = config_of(0.5)
    config.calibration = statistics("llama")
    with pytest.raises(ValueError, match="statistics hold no labelled inputs"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_a_cache_that_packs_nothing_has_nothing_to_guard_from():
    with pytest.raises(ValueError, match="in the model's dtype: give it fewer bits"):
        guarded("llama", cache=CacheConfig(bits=16))


def test_data_that_nothing_is_measured_on_are_refused():
    with pytest.raises(ValueError, match="gives no rank to fit"):
        guarded("llama", selector="random")
