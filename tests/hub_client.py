"""Client processes of test_hub.py: `python hub_client.py SCENARIO FOLDER` writes what it saw to FOLDER/SCENARIO.json.

They run on their own because `huggingface_hub` reads the endpoint, the cache folder and offline mode on import, and
because one must not have imported hf_wsvd.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from tiny_models import build, prompt
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


METRICS = [{"dataset": "ScienceQA", "metric": "accuracy", "dense": 0.8, "compressed": 0.76, "samples": 100}]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompt("llama")).logits


def pull(repo_id: str, **options) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(repo_id, **options))


def error_of(function, *arguments, **options) -> str:
    """Type and text of the exception; "" if there is none."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compressed(dense: str, ratio: float) -> PreTrainedModel:
    from hf_wsvd import WSVDConfig, compress

    model = AutoModelForCausalLM.from_pretrained(dense)
    batches = [prompt("llama", seed=seed) for seed in range(4)]
    return compress(
        model, WSVDConfig(rank_ratio=ratio, rank_allocation="uniform", refinement="none"), calibration=batches
    )


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "yes", "no"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))


def push_and_pull(folder: Path) -> dict:
    """With the token of `me`: every way to push, and the pulls of what was pushed."""
    from hf_wsvd import verify
    from hf_wsvd.hub import push_to_hub
    from hf_wsvd.self_check import set_self_check

    hub = HfApi()
    build("llama").push_to_hub("me/base")
    half, quarter = compressed("me/base", 0.5), compressed("me/base", 0.25)
    expected = {"half": logits(half), "quarter": logits(quarter)}
    save_file(expected, folder / "expected.safetensors")
    seen: dict = {"differ": not torch.equal(expected["half"], expected["quarter"])}

    half.push_to_hub("me/plain", private=True)
    first = push_to_hub(half, "me/full", processor=tokenizer(), metrics=METRICS, dataset="me/data", license="mit").oid
    second = quarter.push_to_hub("me/full", revision="v1", commit_message="quarter").oid
    pulls = {
        "by name": ("half", pull("me/plain")),
        "by branch": ("quarter", pull("me/full", revision="v1")),
        "main has not moved": ("half", pull("me/full")),
        "by commit": ("quarter", pull("me/full", revision=second)),
        "from the cache": ("half", pull("me/plain", local_files_only=True)),
    }
    seen["vocabulary"] = len(AutoTokenizer.from_pretrained("me/full"))

    # Weight files of one push must not survive the next: a single file and shards together load the wrong one.
    quarter.push_to_hub("me/shards", max_shard_size="50GB")
    half.push_to_hub("me/shards", max_shard_size="20KB")
    pulls["sharded over single"] = ("half", pull("me/shards"))
    seen["sharded"] = hub.list_repo_files("me/shards")
    quarter.push_to_hub("me/shards")
    pulls["single over sharded"] = ("quarter", pull("me/shards"))
    seen["single"] = hub.list_repo_files("me/shards")
    unchecked = copy.deepcopy(quarter)
    set_self_check(unchecked, None)
    unchecked.push_to_hub("me/shards")
    seen["unchecked"] = hub.list_repo_files("me/shards")

    half.save_pretrained(folder / "saved", push_to_hub=True, repo_id="me/saved")
    pulls["pushed by save_pretrained"] = ("half", pull("me/saved"))
    again = AutoModelForCausalLM.from_pretrained("me/saved")
    again.push_to_hub("me/again")
    seen["verified"] = verify(AutoModelForCausalLM.from_pretrained("me/again")).passed
    again.dequantize()
    again.push_to_hub("me/dense")
    seen["dequantized"] = (type(again) is LlamaForCausalLM, again.model_tags)

    readme = "---\nlanguage: en\ntags: [mine]\n---\n# By hand\n\nWritten by people.\n"
    hub.create_repo("me/readme")
    hub.upload_file(path_or_fileobj=readme.encode(), path_in_repo="README.md", repo_id="me/readme")
    half.push_to_hub("me/readme")
    quarter.push_to_hub("me/readme", tags="more")

    # Another user, who may read me/full and propose a change to it, but not write.
    seen["proposal"] = half.push_to_hub("me/full", create_pr=True, token="token-of-you").pr_url
    seen["errors"] = {
        "foreign namespace": error_of(half.push_to_hub, "you/model"),
        "foreign repository": error_of(half.push_to_hub, "me/full", token="token-of-you"),
        "foreign branch": error_of(half.push_to_hub, "me/full", revision="theirs", token="token-of-you"),
        "no token": error_of(half.push_to_hub, "me/other", token=False),
        "pull request against a branch": error_of(half.push_to_hub, "me/full", revision="v1", create_pr=True),
        "broken metrics": error_of(push_to_hub, half, "me/unmeasured", metrics=[{"dataset": "x", "score": 1}]),
        "private, no token": error_of(pull, "me/plain", token=False, cache_dir=folder / "empty"),
        "private, another's token": error_of(pull, "me/plain", token="token-of-you", cache_dir=folder / "empty"),
        "gated": error_of(pull, "you/gated", cache_dir=folder / "empty"),
        "missing revision": error_of(pull, "me/full", revision="v9"),
        "missing repository": error_of(pull, "me/nothing"),
    }
    seen["pulls"] = {name: torch.equal(expected[which], got) for name, (which, got) in pulls.items()}
    seen["commits"] = {"first": first, "second": second}
    seen["left over"] = [str(path) for path in Path(os.environ["TMPDIR"]).rglob("*") if path.is_file()]
    return seen


def offline(folder: Path) -> dict:
    """With `HF_HUB_OFFLINE=1`: what the first process left in the cache is all there is."""
    seen = {"import forgotten": error_of(pull, "me/plain"), "imported": "hf_wsvd" in sys.modules}
    import hf_wsvd  # noqa: F401

    expected = load_file(folder / "expected.safetensors")
    pulls = {"by name": ("half", pull("me/plain")), "by branch": ("quarter", pull("me/full", revision="v1"))}
    seen["pulls"] = {name: torch.equal(expected[which], got) for name, (which, got) in pulls.items()}
    return seen | {"never pulled": error_of(pull, "me/readme")}


if __name__ == "__main__":
    scenario, target = sys.argv[1], Path(sys.argv[2])
    result = {"push_and_pull": push_and_pull, "offline": offline}[scenario](target)
    (target / f"{scenario}.json").write_text(json.dumps(result), encoding="utf-8")
