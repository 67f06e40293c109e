"""Model cards, and the methods of a compressed model that write them."""

import copy
import gc
import pickle
import weakref
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from tiny_models import CLOSED_FORM, build, calibration_batches, prompt
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_wsvd import WSVDCache, WSVDConfig, compress
from hf_wsvd.card import base_model_on_hub, describe_ranks, hub_name, kv_bytes_per_token, merge_cards
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.hub import Measurement, model_card, push_to_hub
from hf_wsvd.model_class import install_methods, remove_methods


SNIPPET = "```python\nimport hf_wsvd"


@pytest.fixture
def model(compressed) -> PreTrainedModel:
    return compressed("llama")


def test_measurement_recovery():
    assert Measurement("a", "accuracy", 0.76, 0.8).recovery == pytest.approx(95)
    assert Measurement("a", "perplexity", 8.0, 6.0, higher_is_better=False).recovery == pytest.approx(75)
    assert Measurement("a", "accuracy", 0.5).recovery is None
    assert Measurement("a", "accuracy", 0.5, 0.0).recovery is None


def test_card_says_what_was_not_measured(model):
    card = model_card(model)
    assert "Not measured" in card.text
    assert "model-index" not in card.data.to_dict()
    assert "| samples | 8 |" in card.text
    assert "keys 8; values 8" in card.text


def test_names_of_data_stay_in_their_cells_of_the_table(model):
    named = copy.deepcopy(model)
    named.config.quantization_config.calibration_info = {
        "dataset": "a|b\n\n# Title\r\n<!-- hf_wsvd:end --><script>",
        "dataset_name": "x & y",
        "split": "train\u2028| more",
        "preset": "<b>",
        "samples": 8,
    }
    text = model_card(named).text
    table = text.split("## Calibration")[1].split("## Limits")[0].strip().splitlines()
    assert table == [
        "| | |",
        "|---|---|",
        "| dataset | a&#124;b # Title &lt;!-- hf_wsvd:end --&gt;&lt;script&gt; |",
        "| dataset name | x &amp; y |",
        "| split | train &#124; more |",
        "| preset | &lt;b&gt; |",
        "| samples | 8 |",
    ]
    assert merge_cards(model_card(named), model_card(model)).text == model_card(model).text


def test_card_of_a_vision_language_model(compressed):
    card = model_card(compressed("llava"), repo_id="me/vision")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert 'AutoModelForImageTextToText.from_pretrained("me/vision"' in card.text
    assert "AutoProcessor" in card.text


def test_card_of_a_plain_model_is_refused(dense):
    plain = dense("llama")
    with pytest.raises(ValueError, match="not compressed"):
        model_card(plain)
    with pytest.raises(ValueError, match="not compressed"):
        push_to_hub(plain, "me/plain")


@pytest.mark.parametrize("path", ["/models/secret", "./secret", "../models/secret", "a/b/secret", "existing/secret"])
def test_no_local_path_gets_into_the_card(model, path, tmp_path, monkeypatch, caplog):
    (tmp_path / "existing" / "secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    card = model_card(model, repo_id="me/x", base_model=path)
    assert "secret" not in str(card)
    assert "names no base model" in caplog.text
    assert model_card(model, base_model="owner/name").data.base_model == "owner/name"


def test_base_model_counts_only_if_it_came_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--owner--pulled" / "snapshots").mkdir(parents=True)
    names = ["owner/pulled", "runs/best", "/models/secret", "", None]
    models = [SimpleNamespace(config=SimpleNamespace(_name_or_path=name)) for name in names]
    assert [base_model_on_hub(model) for model in models] == ["owner/pulled", None, None, None, None]
    assert hub_name("gpt2") == "gpt2"


@pytest.mark.parametrize("family", ["llama", "qwen3", "llava"])
@pytest.mark.parametrize("options", [{"rank_ratio": 0.25}, {"layers_to_not_convert": (1,)}])
def test_kv_bytes_are_those_of_a_real_cache(compressed, family, options):
    model = compressed(family, **options)
    inputs = prompt(family)
    tokens = inputs["input_ids"].shape[1]
    cache = WSVDCache(model)
    model(**inputs, **{CACHE_ARGUMENT: cache})
    held = sum(tensor.numel() for layer in cache.layers for tensor in (layer.keys, layer.values))
    rows = {id(layer.rows): layer.rows for layer in cache.layers if getattr(layer, "rows", None) is not None}
    held += sum(tensor.numel() for row in rows.values() for tensor in (row.keys, row.values))
    assert kv_bytes_per_token(model) == {"dense": 3 * 2 * 2 * 16 * 4, "compressed": held * 4 / tokens}


def test_describe_ranks():
    assert describe_ranks([8, 8]) == "8"
    assert describe_ranks([4, None, 8]) == "4 to 8, 6.0 on average (1 of 3 layers dense)"
    assert describe_ranks([None]) == "dense in all layers"


def test_scores_of_earlier_weights_do_not_stay(model):
    first = model_card(model, metrics=[Measurement("ScienceQA", "accuracy", 0.76, 0.8)])
    merged = merge_cards(first, model_card(model))
    assert "ScienceQA" not in str(merged)
    assert merged.text == model_card(model).text


def test_save_pretrained_writes_the_card_and_no_other_readme(compressed, tmp_path):
    model = compressed("llama")
    model.save_pretrained(tmp_path / "new")
    assert SNIPPET in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "project").mkdir()
    readme = tmp_path / "project" / "README.md"
    for text in (b"# A project\n", b"---\n[: no YAML\n---\n", b"\xff\xfe no UTF-8"):
        readme.write_bytes(text)
        model.save_pretrained(tmp_path / "project")
        assert readme.read_bytes() == text
    compressed("llama", rank_ratio=0.25).save_pretrained(tmp_path / "new")
    assert "keys 4" in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")


def test_only_the_main_process_writes_the_card(model, tmp_path):
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_write_the_card_of_their_own_weights(duplicate, model, tmp_path):
    copied = duplicate(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    copied.save_pretrained(tmp_path)
    assert SNIPPET in (tmp_path / "README.md").read_text(encoding="utf-8")
    restored = LlamaForCausalLM.from_pretrained(tmp_path)
    assert restored.lm_head.weight.count_nonzero() == 0
    assert model.lm_head.weight.count_nonzero() > 0


def test_a_compressed_model_is_freed_with_its_last_reference():
    model = compress(build("llama"), WSVDConfig(**CLOSED_FORM), calibration=calibration_batches("llama"))
    gc.collect()
    gc.disable()
    try:
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_a_compressed_model_saves_without_a_name(model, tmp_path):
    """The expression that makes the model may hold its only reference."""
    copy.deepcopy(model).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").exists()


def test_class_with_card_passes_for_the_models_class(model, dense):
    assert isinstance(model, LlamaForCausalLM)
    assert repr(type(model)) == repr(LlamaForCausalLM)
    for name in ("push_to_hub", "save_pretrained"):
        assert signature(getattr(model, name)) == signature(getattr(dense("llama"), name))
        assert getattr(model, name).__doc__ == getattr(PreTrainedModel, name).__doc__


def test_remove_undoes_install():
    plain = build("llama")
    remove_methods(plain)
    plain.add_model_tags("mine")
    install_methods(plain)
    install_methods(plain)
    remove_methods(plain)
    assert type(plain) is LlamaForCausalLM
    assert plain.model_tags == ["mine"]


def test_adapters_are_saved_as_transformers_does(compressed, monkeypatch):
    model = copy.deepcopy(compressed("llama"))
    called = []
    for name in ("push_to_hub", "save_pretrained"):
        method = lambda model, *args, name=name: called.append((name, args))  # noqa: E731
        monkeypatch.setattr(LlamaForCausalLM, name, method)
    model._hf_peft_config_loaded = True
    model.push_to_hub("me/adapters")
    model.save_pretrained("folder")
    assert called == [("push_to_hub", ("me/adapters",)), ("save_pretrained", ("folder", True, None, False))]
    with pytest.raises(ValueError, match="adapters"):
        push_to_hub(model, "me/adapters")
