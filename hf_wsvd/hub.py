"""Pushing a compressed model to the Hub: weights, processor and model card in one commit.

A compressed model's own `push_to_hub` and `save_pretrained` write the card too: see `CardMixin`. Transformers' own
`push_to_hub` writes a generic card over what `save_pretrained` has left.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel

from .card import GENERATED_BLOCK, Measurement, check_compressed, measurements, merge_cards, model_card
from .self_check_file import SELF_CHECK_FILE, save_self_check
from .version import __version__


__all__ = ["CardMixin", "Measurement", "model_card", "push_to_hub"]

# What `save_pretrained` may call the weights. A repository that holds both one file and shards loads the wrong ones.
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
BELONGS_TO_WEIGHTS = re.compile(rf"{WEIGHT_FILE.pattern}|{re.escape(SELF_CHECK_FILE)}")


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    processor: Any = None,
    base_model: str | None = None,
    metrics: Iterable[Measurement | Mapping[str, Any]] | None = None,
    kv_bytes: Mapping[str, float] | None = None,
    dataset: str | list[str] | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: str | list[str] | None = None,
) -> CommitInfo:
    """Push a compressed model, its processor and its card to the Hub, in one commit.

    Text that people wrote into the repository's card is kept; the generated part is brought up to date. Weight files
    of an earlier push that this one does not replace are deleted.

    Args:
        model: A model compressed with WSVD.
        repo_id: `"owner/name"`, or `"name"` under the token's user; created if it does not exist.
        processor: The processor or tokenizer to push along.
        base_model, metrics, kv_bytes, dataset, license: For the card, see `model_card`.
        private: Whether a new repository is private; by default as the owner's settings say.
        token: A token; by default the one `hf auth login` stored.
        revision: Branch to push to; created from `main` if it does not exist.
        create_pr: Open a pull request against `main` instead.
        max_shard_size: Largest weight file, as in `save_pretrained`.
        tags: More tags for the card.

    Raises:
        ValueError: the model is not compressed, has adapters loaded, or `create_pr` comes with a `revision`.
        TypeError: a measurement with an unknown or a missing field.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses; before anything is written if the repository or the
            branch may not be created.
    """
    check_compressed(model)
    if _has_adapters(model):
        raise ValueError("The model has adapters loaded; push them with `model.push_to_hub`, or unload them first")
    if create_pr and revision not in (None, "main"):
        raise ValueError(f"create_pr opens a pull request against main: revision={revision!r} cannot go with it")
    metrics = measurements(metrics)
    hub, repo_id = _open_repository(repo_id, private=private, token=token, revision=revision)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if processor is not None:
            processor.save_pretrained(folder)
        card = model_card(
            model,
            repo_id=repo_id,
            base_model=base_model,
            metrics=metrics,
            kv_bytes=kv_bytes,
            dataset=dataset,
            license=license,
            with_processor=processor is not None,
            tags=[tags] if isinstance(tags, str) else tags or (),
        )
        _merged(_remote_card(hub, repo_id, revision), card).save(folder / "README.md")
        options = {"commit_message": commit_message, "commit_description": commit_description, "create_pr": create_pr}
        return _commit(hub, repo_id, folder, set(_times(folder)), revision=revision, **options)


class CardMixin:
    """`push_to_hub` and `save_pretrained` of a compressed model: transformers' own, and our self-check and card.

    With adapters loaded, transformers saves the adapters alone, and they are not what the card describes.
    """

    @functools.wraps(PreTrainedModel.push_to_hub)
    def push_to_hub(self, repo_id: str, **options: Any) -> CommitInfo:
        if _has_adapters(self):
            return super().push_to_hub(repo_id, **options)
        return push_to_hub(self, repo_id, **options)

    @functools.wraps(PreTrainedModel.save_pretrained)
    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        save = functools.partial(super().save_pretrained, save_directory, is_main_process, state_dict)
        folder = Path(save_directory)
        if _has_adapters(self) or not is_main_process:
            save(push_to_hub, **options)
        elif not push_to_hub:
            save(**options)
            save_self_check(self, folder)
            _write_local_card(self, folder)
        else:
            commit = {name: options.pop(name, None) for name in ("commit_message", "commit_description")}
            commit["create_pr"] = options.pop("create_pr", False)
            repo_id, private = options.pop("repo_id", folder.name), options.pop("private", None)
            hub, repo_id = _open_repository(repo_id, private=private, token=options.get("token"))
            before = _times(folder)
            save(**options)
            save_self_check(self, folder)
            _merged(_remote_card(hub, repo_id), model_card(self, repo_id=repo_id)).save(folder / "README.md")
            changed = {path for path, time in _times(folder).items() if before.get(path) != time}
            _commit(hub, repo_id, folder, changed, **commit)


def _has_adapters(model: PreTrainedModel) -> bool:
    return getattr(model, "_hf_peft_config_loaded", False)


def _times(folder: Path) -> dict[str, int]:
    """Modification times of all files below `folder`, by their path in the repository."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files}


def _open_repository(
    repo_id: str, *, private: bool | None = None, token: str | bool | None = None, revision: str | None = None
) -> tuple[HfApi, str]:
    """The Hub client and the full name of the repository, with its branch, both created where missing."""
    hub = HfApi(token=token, library_name="hf_wsvd", library_version=__version__)
    repo_id = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr/"):
        hub.create_branch(repo_id, branch=revision, exist_ok=True)
    return hub, repo_id


def _merged(present: ModelCard | None, new: ModelCard) -> ModelCard:
    return new if present is None else merge_cards(present, new)


def _write_local_card(model: PreTrainedModel, folder: Path) -> None:
    """Write the card, or bring an earlier one up to date; a README that is not a model card of ours stays as it is."""
    path = folder / "README.md"
    if not path.exists():
        model_card(model).save(path)
    elif GENERATED_BLOCK.search(path.read_text(encoding="utf-8", errors="replace")):
        merge_cards(ModelCard.load(path), model_card(model)).save(path)


def _remote_card(hub: HfApi, repo_id: str, revision: str | None = None) -> ModelCard | None:
    with tempfile.TemporaryDirectory() as cache:
        try:
            return ModelCard.load(hub.hf_hub_download(repo_id, "README.md", revision=revision, cache_dir=cache))
        except EntryNotFoundError:
            return None


def _commit(
    hub: HfApi,
    repo_id: str,
    folder: Path,
    paths: set[str],
    *,
    revision: str | None = None,
    commit_message: str | None,
    **options: Any,
) -> CommitInfo:
    """Commit `paths` of `folder`; weights and self-check of before that are not among them go."""
    stale = []
    if any(WEIGHT_FILE.fullmatch(path) for path in paths):  # not so when a variant is saved beside them
        present = hub.list_repo_files(repo_id, revision=revision)
        stale = [path for path in present if BELONGS_TO_WEIGHTS.fullmatch(path) and path not in paths]
    added = [CommitOperationAdd(path, folder / path) for path in sorted(paths)]
    operations = [*added, *map(CommitOperationDelete, stale)]
    message = commit_message or "Upload model compressed with hf_wsvd"
    return hub.create_commit(repo_id, operations, commit_message=message, revision=revision, **options)
