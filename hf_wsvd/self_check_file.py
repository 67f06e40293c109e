"""The self-check as a file beside the weights: safetensors, and JSON in its header. What is read is not trusted."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .calibration.answers import TOP
from .calibration.samples import MAX_SAMPLES, runs_along_tokens
from .calibration.taken import INPUT_NAME, NOT_INPUTS
from .self_check import PARTS, Distance, Sample, SelfCheck, self_check_of, set_self_check
from .tensor_file import DTYPES


logger = logging.get_logger("hf_wsvd")

SELF_CHECK_FILE = "wsvd_self_check.safetensors"
MAX_FILE_BYTES = 16 * 2**20  # what is written stays far below
FORMAT_VERSION = 1
KEY = "self_check"  # of the JSON in the file's metadata
ANSWERS = ("top", "dense", "compressed")


def save_self_check(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's self-check into a checkpoint folder; without one, remove what an earlier model left there."""
    check, path = obtain_self_check(model), folder / SELF_CHECK_FILE
    if check is None:
        path.unlink(missing_ok=True)
    elif folder.is_dir():
        try:
            write_self_check(check, path)
        except ValueError as error:
            path.unlink(missing_ok=True)
            logger.warning(f"hf_wsvd: the checkpoint is saved without its self-check: {error}")


def write_self_check(check: SelfCheck, path: Path) -> None:
    """Write a self-check as one safetensors file. ValueError if `read_self_check` would refuse it."""
    tensors: dict[str, Tensor] = {}
    for number, sample in enumerate(check.samples):
        tensors |= {f"{number}.inputs.{name}": value for name, value in sample.inputs.items()}
        tensors |= {f"{number}.{name}": getattr(sample, name) for name in ANSWERS}
    header = {
        "version": FORMAT_VERSION,
        "source": check.source,
        "dtype": check.dtype,
        "versions": check.versions,
        "splits": [sample.split for sample in check.samples],
        **{part: vars(getattr(check, part)) for part in PARTS},
    }
    # Copies: safetensors refuses tensors that share memory, as the columns of one sample may.
    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    _checked(json.loads(json.dumps(header)), dict(copies))
    save_file(copies, path, metadata={"format": "pt", KEY: json.dumps(header)})


def load_self_check(model: PreTrainedModel, folder: str | Path | None) -> None:
    """Let a model carry the self-check that lies beside its weights; a damaged one is left out, with a warning."""
    set_self_check(model, None)
    path = None if folder is None else Path(folder) / SELF_CHECK_FILE
    if path is None or not path.is_file():
        return
    try:
        set_self_check(model, read_self_check(path))
    except ValueError as error:
        logger.warning(f"hf_wsvd: the checkpoint is loaded without its self-check: {error}")


def obtain_self_check(model: PreTrainedModel) -> SelfCheck | None:
    """The self-check that a model carries, or that of the Hub commit that its weights came from.

    `from_pretrained` downloads weights alone. What is found is kept; where nothing is found, nothing is asked again.
    """
    check, quantizer = self_check_of(model), getattr(model, "hf_quantizer", None)
    folder = getattr(quantizer, "checkpoint_folder", None)
    if check is not None or folder is None:
        return check
    quantizer.checkpoint_folder = None
    snapshot = re.fullmatch(r"models--(.+)/snapshots/([0-9a-f]{40})", "/".join(Path(folder).parts[-3:]))
    if snapshot is None:
        return None
    repo_id, commit = snapshot[1].replace("--", "/"), snapshot[2]
    try:
        hf_hub_download(repo_id, SELF_CHECK_FILE, revision=commit, cache_dir=Path(folder).parents[2])
    except (OSError, EntryNotFoundError):  # none there, no network, no access
        return None
    load_self_check(model, folder)
    return self_check_of(model)


def download_self_check(name: str, revision: str | None = None) -> Path | None:
    """The self-check of a folder or of a Hub repository (downloaded beside its weights), or None if it has none."""
    if Path(name).is_dir():
        path = Path(name) / SELF_CHECK_FILE
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, SELF_CHECK_FILE, revision=revision))
    except EntryNotFoundError:
        return None


def read_self_check(path: Path) -> SelfCheck:
    """Read and check a self-check file; nothing in it has been run yet.

    Raises:
        ValueError: the file is larger than 16 MiB or no readable safetensors file, or its names, dtypes, shapes or
            numbers are not those of a self-check.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} holds {size:,} bytes; a self-check holds at most {MAX_FILE_BYTES:,}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable self-check (truncated or corrupted?): {error}") from error
    try:
        return _checked(header, tensors)
    except (ValueError, TypeError, RuntimeError) as error:  # the latter from torch, on tensors of exotic dtypes
        raise ValueError(f"{path} is not a valid self-check: {error}") from error


def _checked(header: Any, tensors: dict[str, Tensor]) -> SelfCheck:
    _expect(isinstance(header, dict), "the header is no mapping")
    _expect(header.get("version") == FORMAT_VERSION, f"version {header.get('version')!r}, known is {FORMAT_VERSION}")
    _expect(header.get("source") in ("calibration", "probe"), f"source={header.get('source')!r}")
    _expect(header.get("dtype") in ("float32", "float16", "bfloat16", "float64"), f"dtype={header.get('dtype')!r}")
    versions, splits = header.get("versions"), header.get("splits")
    texts = isinstance(versions, dict) and all(isinstance(v, str) and len(v) < 100 for v in versions.values())
    _expect(texts and set(versions) == {"hf_wsvd", "transformers", "torch"}, f"versions={versions!r}")
    _expect(isinstance(splits, list) and 1 <= len(splits) <= MAX_SAMPLES, f"splits={splits!r}")
    samples = []
    for number, split in enumerate(splits):
        own = {name.partition(".")[2]: tensors.pop(name) for name in list(tensors) if name.startswith(f"{number}.")}
        samples.append(_checked_sample(number, split, own))
    _expect(not tensors, f"unknown tensors {sorted(tensors)[:3]}")
    decoded = sum(int(sample.decoded().sum()) for sample in samples)
    positions = {"prefill": sum(len(sample.top) for sample in samples) - decoded, "decode": decoded}
    parts = {part: _checked_distance(part, header.get(part), positions[part]) for part in PARTS}
    return SelfCheck(samples, header["source"], header["dtype"], versions, **parts)


def _checked_sample(number: int, split: Any, tensors: dict[str, Tensor]) -> Sample:
    prefix = "inputs."
    inputs = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    answers = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
    _expect(set(answers) == set(ANSWERS), f"sample {number} has answers {sorted(answers)}, wanted {sorted(ANSWERS)}")
    for name, value in inputs.items():
        named = INPUT_NAME.fullmatch(name) and name not in NOT_INPUTS
        _expect(bool(named) and value.dtype in DTYPES, f"sample {number} has an input {name!r} of {value.dtype}")
        finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
        _expect(finite, f"input {name!r} of sample {number} is not finite")
    for name, value in inputs.items():  # a grid that no pixels stand behind would have a vision tower build it
        if name.endswith("_grid_thw"):
            pixels = inputs.get("pixel_values_videos" if name.startswith("video") else "pixel_values")
            patches = -1 if pixels is None else len(pixels)
            whole = value.ndim == 2 and value.dtype == torch.int64 and bool((value > 0).all())
            fits = whole and int(value.double().prod(1).sum()) == patches
            _expect(fits, f"{name} of sample {number} does not describe its {max(patches, 0)} patches")
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    _expect((ids is None) != (embeds is None), f"sample {number} needs input_ids or inputs_embeds")
    tokens = ids if embeds is None else embeds
    right = tokens.ndim == (2 if embeds is None else 3) and tokens.is_floating_point() == (ids is None)
    _expect(right and tokens.numel() > 0, f"the tokens of sample {number} are {_form(tokens)}")
    length = tokens.shape[1]
    for name, value in inputs.items():
        if name == "attention_mask":
            _expect(value.shape == tokens.shape[:2], f"the {name} of sample {number} is {_form(value)}")
        elif name != "inputs_embeds" and runs_along_tokens(name):
            _expect(value.ndim >= 2 and value.shape[-1] == length, f"{name} of sample {number} is {_form(value)}")
    inside = isinstance(split, int) and not isinstance(split, bool) and 1 <= split < length
    _expect(inside, f"sample {number} has split={split!r}, allowed: 1 to {length - 1}")
    top = answers["top"]
    sample = Sample(inputs, split, **answers)
    count = int(sample.compared().sum())
    kept = top.ndim == 2 and len(top) == count > 0 and 1 <= top.shape[1] <= TOP and top.dtype == torch.int32
    _expect(kept and int(top.min()) >= 0, f"top of sample {number} is {_form(top)}, wanted [{count}, K] int32")
    for name in ("dense", "compressed"):
        value = answers[name]
        fits = value.dtype == torch.float32 and value.shape == (count, top.shape[1] + 1)
        _expect(fits, f"{name} of sample {number} is {_form(value)}, wanted [{count}, {top.shape[1] + 1}] float32")
        # The sums of probabilities, NaN included.
        sums = value.double().exp().sum(1)
        _expect(bool(((sums - 1).abs() < 1e-2).all()), f"{name} of sample {number} are no log-probabilities")
    return sample


def _checked_distance(part: str, held: Any, positions: int) -> Distance:
    _expect(isinstance(held, dict) and set(held) == {"kl", "agreement", "tokens"}, f"{part}={held!r}")
    kl, agreement, tokens = (held[name] for name in ("kl", "agreement", "tokens"))
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in (kl, agreement))
    _expect(numbers and kl > -1e-3 and 0 <= agreement <= 1, f"{part}={held!r}")
    _expect(tokens == positions > 0, f"{part} has tokens={tokens!r}, its answers {positions}")
    return Distance(float(kl), float(agreement), positions)


def _form(value: Tensor) -> str:
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _expect(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(found)
