"""Model cards; pushing to and pulling from a loopback Hub with the real client, in processes of its own."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import HubServer
from hub_storage import Repository
from huggingface_hub import ModelCard, constants
from tiny_models import build, prompt
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_wsvd import WSVDCache, WSVDConfig, compress
from hf_wsvd.card import base_model_on_hub, describe_ranks, hub_name, kv_bytes_per_token, merge_cards
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.hub import Measurement, install_push_to_hub, model_card, push_to_hub, remove_push_to_hub


CLIENT = Path(__file__).with_name("hub_client.py")
SNIPPET = """```python
import hf_wsvd"""


def compressed(family: str = "llama", **options) -> PreTrainedModel:
    options = options or {"rank_ratio": 0.5}
    return compress(build(family), WSVDConfig(**options), calibration=[prompt(family, seed=s) for s in range(4)])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return compressed()


@pytest.fixture(scope="module")
def hub():
    with HubServer({"token-of-me": "me", "token-of-you": "you"}) as server:
        server.repositories["you/gated"] = Repository("you/gated", gated=True)
        yield server


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    """Runs a scenario of hub_client.py and returns what it saw, with the end of its error output."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "tmp").mkdir()

    def run(scenario: str, **options) -> SimpleNamespace:
        environment = os.environ | hub.environment(folder / "home", token="token-of-me", **options)
        process = subprocess.run(
            [sys.executable, str(CLIENT), scenario, str(folder)],
            env=environment | {"TMPDIR": str(folder / "tmp")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        seen = json.loads((folder / f"{scenario}.json").read_text(encoding="utf-8"))
        return SimpleNamespace(seen=seen, stderr=process.stderr)

    return run


@pytest.fixture(scope="module")
def online(client) -> dict:
    return client("push_and_pull").seen


def card_in(hub: HubServer, repo_id: str, revision: str = "main") -> ModelCard:
    return ModelCard(hub.repositories[repo_id].file(revision, "README.md").content.decode())


# Through the Hub


def test_pulled_models_compute_the_pushed_logits(online):
    assert online["differ"]  # the two models that the pulls are told apart by
    assert online["pulls"] == dict.fromkeys(online["pulls"], True)
    assert online["vocabulary"] == 5


def test_a_push_is_one_commit_with_everything_in_it(online, hub):
    commits = hub.repositories["me/full"].history("main")
    assert commits[0].id == online["commits"]["first"]
    assert len(commits) == 2  # with the one that made the repository
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= set(commits[0].files)
    (branch, parent, _) = hub.repositories["me/full"].history("v1")
    assert (branch.title, parent.id) == ("quarter", online["commits"]["first"])


def test_card_of_a_full_push(online, hub):
    card = card_in(hub, "me/full")
    data = card.data.to_dict()
    assert data["base_model"] == "me/base"
    assert data["base_model_relation"] == "quantized"
    assert (data["library_name"], data["pipeline_tag"], data["license"]) == ("transformers", "text-generation", "mit")
    assert data["datasets"] == ["me/data"]
    assert {"hf_wsvd", "wsvd", "low-rank", "kv-cache"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]
    assert (result["dataset"]["name"], result["metrics"][0]["value"]) == ("ScienceQA", 0.76)
    assert "| ScienceQA | accuracy | 100 | 0.8 | 0.76 | 95.0 % |" in card.text
    assert SNIPPET in card.text
    assert 'AutoTokenizer.from_pretrained("me/full"' in card.text


def test_the_models_own_push_writes_the_card(online, hub):
    for repo_id in ("me/plain", "me/saved", "me/again"):
        card = card_in(hub, repo_id)
        assert SNIPPET in card.text
        assert f'AutoModelForCausalLM.from_pretrained("{repo_id}"' in card.text
        assert card.data.base_model == "me/base"  # also after a round trip, when the model comes from me/saved
        assert "automatically generated" not in card.text
    assert hub.repositories["me/plain"].private


def test_a_dequantized_model_is_pushed_as_any_other(online, hub):
    assert online["dequantized"] == [True, None]
    assert SNIPPET not in card_in(hub, "me/dense").text
    assert "quantization_config" not in json.loads(hub.repositories["me/dense"].file("main", "config.json").content)


def test_weight_files_of_an_earlier_push_are_deleted(online):
    assert "model.safetensors" not in online["sharded"]
    assert "model.safetensors.index.json" in online["sharded"]
    assert [name for name in online["single"] if name.startswith("model")] == ["model.safetensors"]


def test_what_people_wrote_into_the_card_is_kept(online, hub):
    card = card_in(hub, "me/readme")
    assert card.text.startswith("# By hand\n\nWritten by people.\n")
    assert card.text.count(SNIPPET) == 1
    assert "keys 4" in card.text  # the second push had other ranks
    assert "keys 8" not in card.text
    assert card.data.language == "en"
    assert card.data.tags == ["mine", "hf_wsvd", "wsvd", "low-rank", "kv-cache", "more"]


def test_a_pull_request_leaves_main_alone(online, hub):
    assert online["proposal"].endswith("/me/full/discussions/1")
    repository = hub.repositories["me/full"]
    assert SNIPPET in card_in(hub, "me/full", "refs/pr/1").text
    assert repository.resolve("main").id == online["commits"]["first"]


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "foreign namespace": ["HfHubHTTPError: 403", "you don't have the rights to create", "you/model"],
        "foreign repository": ["HfHubHTTPError: 403", "me/full"],
        "foreign branch": ["HfHubHTTPError: 403", "/branch/theirs"],
        "no token": ["401", "Invalid username or password"],
        "pull request against a branch": ["ValueError", "revision='v1'"],
        "broken metrics": ["TypeError", "score"],
        "private, no token": ["OSError", "me/plain", "token"],
        "private, another's token": ["OSError", "me/plain", "token"],
        "gated": ["OSError", "gated repo", "you/gated"],
        "missing revision": ["OSError", "v9 is not a valid git identifier"],
        "missing repository": ["OSError", "me/nothing"],
    }.items(),
)
def test_refusals_are_clear(online, case, parts):
    message = online["errors"][case].lower()
    assert [part for part in parts if part.lower() not in message] == []


def test_no_push_leaves_files_behind(online, hub):
    """Neither on this machine nor, after a refusal, on the Hub."""
    assert online["left over"] == []
    assert "you/model" not in hub.repositories
    assert "me/other" not in hub.repositories
    assert "refs/heads/theirs" not in hub.repositories["me/full"].references


def test_offline_and_without_the_import(online, client, hub):
    before = len(hub.requests)
    result = client("offline", offline=True)
    assert len(hub.requests) == before
    assert result.seen["pulls"] == {"by name": True, "by branch": True}
    assert result.seen["never pulled"].startswith("OSError")
    assert not result.seen["imported"]
    assert result.seen["import forgotten"].startswith("RuntimeError")
    assert "k_proj.weight" in result.stderr  # transformers names what does not fit
    assert "size mismatch" in result.stderr


# The card


def test_measurement_recovery():
    assert Measurement("a", "accuracy", 0.76, 0.8).recovery == pytest.approx(95)
    assert Measurement("a", "perplexity", 8.0, 6.0, higher_is_better=False).recovery == pytest.approx(75)
    assert Measurement("a", "accuracy", 0.5).recovery is None
    assert Measurement("a", "accuracy", 0.5, 0.0).recovery is None


def test_card_says_what_was_not_measured(model):
    card = model_card(model)
    assert "Not measured" in card.text
    assert "model-index" not in card.data.to_dict()
    assert "| samples | 4 |" in card.text
    assert "keys 8; values 8" in card.text


def test_card_of_a_vision_language_model():
    card = model_card(compressed("llava"), repo_id="me/vision")
    assert card.data.pipeline_tag == "image-text-to-text"
    assert 'AutoModelForImageTextToText.from_pretrained("me/vision"' in card.text
    assert "AutoProcessor" in card.text


def test_card_of_a_plain_model_is_refused():
    plain = build("llama")
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
@pytest.mark.parametrize("options", [{"rank_ratio": 0.25}, {"rank_ratio": 0.5, "layers_to_not_convert": [1]}])
def test_kv_bytes_are_those_of_a_real_cache(family, options):
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


# The model's own methods


def test_save_pretrained_writes_the_card_and_no_other_readme(model, tmp_path):
    model.save_pretrained(tmp_path / "new")
    assert SNIPPET in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "project").mkdir()
    readme = tmp_path / "project" / "README.md"
    readme.write_text("# A project\n", encoding="utf-8")
    model.save_pretrained(tmp_path / "project")
    assert readme.read_text(encoding="utf-8") == "# A project\n"
    compressed(rank_ratio=0.25).save_pretrained(tmp_path / "new")
    assert "keys 4" in (tmp_path / "new" / "README.md").read_text(encoding="utf-8")


def test_only_the_main_process_writes_the_card(model, tmp_path):
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_write_the_card_of_their_own_weights(duplicate, tmp_path):
    original = compressed()
    copied = duplicate(original)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    copied.save_pretrained(tmp_path)
    assert SNIPPET in (tmp_path / "README.md").read_text(encoding="utf-8")
    restored = LlamaForCausalLM.from_pretrained(tmp_path)
    assert restored.lm_head.weight.count_nonzero() == 0
    assert original.lm_head.weight.count_nonzero() > 0


def test_a_compressed_model_is_freed_with_its_last_reference():
    model = compressed()
    gc.collect()
    gc.disable()
    try:
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_class_with_card_passes_for_the_models_class(model):
    assert isinstance(model, LlamaForCausalLM)
    assert repr(type(model)) == repr(LlamaForCausalLM)
    for name in ("push_to_hub", "save_pretrained"):
        assert signature(getattr(model, name)) == signature(getattr(build("llama"), name))
        assert getattr(model, name).__doc__ == getattr(PreTrainedModel, name).__doc__


def test_remove_undoes_install():
    plain = build("llama")
    remove_push_to_hub(plain)
    plain.add_model_tags("mine")
    install_push_to_hub(plain)
    install_push_to_hub(plain)
    remove_push_to_hub(plain)
    assert type(plain) is LlamaForCausalLM
    assert plain.model_tags == ["mine"]


def test_adapters_are_saved_as_transformers_does(monkeypatch):
    model = compressed()
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
