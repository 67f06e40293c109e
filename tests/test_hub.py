"""Pushing to and pulling from a loopback Hub with the real client, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from hub_server import HubServer
from hub_storage import Repository
from huggingface_hub import ModelCard


CLIENT = Path(__file__).with_name("hub_client.py")
SNIPPET = "```python\nimport hf_wsvd"


@pytest.fixture(scope="session")
def round_trip(tmp_path_factory) -> dict:
    """What the scenarios of hub_client.py saw, and the Hub afterwards; run once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, report = shared / "hub_client", shared / "hub_client.json"
    with FileLock(shared / "hub_client.lock"):
        if not report.exists():
            (folder / "tmp").mkdir(parents=True, exist_ok=True)
            report.write_text(json.dumps(run_scenarios(folder)), encoding="utf-8")
    return json.loads(report.read_text(encoding="utf-8"))


def run_scenarios(folder: Path) -> dict:
    with HubServer({"token-of-me": "me", "token-of-you": "you"}) as hub:
        hub.repositories["you/gated"] = Repository("you/gated", gated=True)
        online, _ = run_client("push_and_pull", folder, hub.environment(folder / "home", token="token-of-me"))
        before = len(hub.requests)
        offline, errors = run_client("offline", folder, hub.environment(folder / "home", offline=True))
        requests = hub.requests[before:]
        return {
            "online": online,
            "offline": {**offline, "requests": requests, "stderr": errors},
            "hub": hub.snapshot(),
        }


def run_client(scenario: str, folder: Path, variables: dict[str, str]) -> tuple[dict, str]:
    process = subprocess.run(
        [sys.executable, str(CLIENT), scenario, str(folder)],
        env=os.environ | variables | {"TMPDIR": str(folder / "tmp")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return json.loads((folder / f"{scenario}.json").read_text(encoding="utf-8")), process.stderr


@pytest.fixture(scope="session")
def online(round_trip) -> dict:
    return round_trip["online"]


@pytest.fixture(scope="session")
def hub(round_trip) -> dict:
    """The repositories after all pushes, as `HubServer.snapshot` gives them."""
    return round_trip["hub"]


def history(hub: dict, repo_id: str, reference: str = "refs/heads/main") -> list[dict]:
    return hub[repo_id]["references"][reference]


def card_in(hub: dict, repo_id: str, reference: str = "refs/heads/main") -> ModelCard:
    return ModelCard(history(hub, repo_id, reference)[0]["files"]["README.md"])


def test_pulled_models_compute_the_pushed_logits(online):
    assert online["differ"]  # the two models that the pulls are told apart by
    assert online["pulls"] == dict.fromkeys(online["pulls"], True)
    assert online["vocabulary"] == 5


def test_a_push_is_one_commit_with_everything_in_it(online, hub):
    push, creation = history(hub, "me/full")
    assert push["id"] == online["commits"]["first"]
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= set(push["files"])
    branch = history(hub, "me/full", "refs/heads/v1")
    assert [commit["title"] for commit in branch] == ["quarter", push["title"], creation["title"]]
    assert branch[0]["id"] == online["commits"]["second"]


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
    assert hub["me/plain"]["private"]


def test_a_dequantized_model_is_pushed_as_any_other(online, hub):
    assert online["dequantized"] == [True, None]
    assert SNIPPET not in card_in(hub, "me/dense").text
    config = json.loads(history(hub, "me/dense")[0]["files"]["config.json"])
    assert "quantization_config" not in config


def test_the_self_check_travels_with_the_weights(online, hub):
    """Loading downloads the weights alone; a model from the Hub fetches its self-check when it is asked for."""
    name = "wsvd_self_check.safetensors"
    for repo_id in ("me/full", "me/plain", "me/saved", "me/again"):
        assert name in history(hub, repo_id)[0]["files"]
    assert online["verified"]
    assert name not in history(hub, "me/dense")[0]["files"]
    assert name in online["single"]
    assert name not in online["unchecked"]


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
    assert SNIPPET in card_in(hub, "me/full", "refs/pr/1").text
    assert history(hub, "me/full")[0]["id"] == online["commits"]["first"]


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
    assert {"you/model", "me/other", "me/unmeasured"} & set(hub) == set()
    assert "refs/heads/theirs" not in hub["me/full"]["references"]


def test_offline_pulls_come_from_the_cache(round_trip):
    offline = round_trip["offline"]
    assert offline["requests"] == []
    assert offline["pulls"] == {"by name": True, "by branch": True}
    assert offline["never pulled"].startswith("OSError")


def test_without_the_import_loading_fails(round_trip):
    offline = round_trip["offline"]
    assert not offline["imported"]
    assert offline["import forgotten"].startswith("RuntimeError")
    assert "size mismatch" in offline["stderr"]
    assert "k_proj.weight" in offline["stderr"]  # transformers names what does not fit
