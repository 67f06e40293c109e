"""`HeadMeasures` as a file: what every sample said of every head, for other choices without the model."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..quantizer_config import GuardMap, HeadGuardConfig
from ..tensor_file import Entry, expect, form, read_tensors, write_tensors
from .combination import ABSENT
from .measures import HeadMeasures
from .scoring import HeadScores
from .selectors import ENTRIES


FORMAT_VERSION = 1
KEY = "head_scores"  # of the JSON in the file's metadata
SIDES = ("key", "value")


def save_head_scores(path: str | PathLike[str], measures: HeadMeasures) -> None:
    """Write a safetensors file whole or not at all.

    It holds `scores.key` and `scores.value` fp32 `[layers, heads]`, `raw.*` fp32 as `HeadMeasures.raw`, and as JSON
    the options, the heads of every layer and the record of the calibration data.
    """
    header = {
        "version": FORMAT_VERSION,
        "config": dataclasses.replace(measures.config, guard_map=None).to_dict(),
        "num_key_value_heads": measures.num_key_value_heads,
        "compressed": measures.compressed,
        "info": measures.info,
    }
    scores = {f"scores.{side}": value for side, value in zip(SIDES, measures.scores)}
    raw = {f"raw.{name}": value for name, value in measures.raw.items()}
    entries = [Entry(name, torch.float32, lambda v=value: v) for name, value in {**scores, **raw}.items()]
    write_tensors(Path(path), KEY, header, entries)


def load_head_scores(path: str | PathLike[str]) -> HeadMeasures:
    """Read what `save_head_scores` wrote; the file is not trusted.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file, or damaged.
    """
    header, tensors = read_tensors(Path(path), KEY)
    try:
        return _measures(header, tensors)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no head scores that can be used: {error}") from error


def heads_from_scores(path: str | PathLike[str], config: HeadGuardConfig | dict[str, Any] | None = None) -> GuardMap:
    """Choose heads anew from a file of scores, by other options where the measures allow (`HeadMeasures.guard_map`).

    Args:
        config: None for the options that the scores were made with.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is no such, or options that need another measurement.
    """
    return load_head_scores(path).guard_map(HeadGuardConfig.parse(config))


def _measures(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> HeadMeasures:
    expect(header.get("version") == FORMAT_VERSION, f"its version is {header.get('version')!r}, not {FORMAT_VERSION}")
    config, info = header.get("config"), header.get("info")
    expect(
        isinstance(config, dict) and isinstance(info, dict), "its options or its record of the data are no mappings"
    )
    expect(config.get("guard_map") is None, "its options are not those of a measurement")
    config = HeadGuardConfig.parse(config)
    expect(config.tokens is not None, "its options are not those of a measurement")
    counts = GuardMap(num_key_value_heads=header.get("num_key_value_heads")).num_key_value_heads
    expect(any(counts), "its model has no KV heads")
    present = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    sides = []
    for side in SIDES:
        value = tensors.pop(f"scores.{side}", None)
        expect(value is not None and value.dtype == torch.float32, f"it lacks scores.{side} in float32")
        expect(value.shape == present.shape, f"scores.{side} is {form(value)}, wanted {list(present.shape)}")
        right = torch.isfinite(value[present]).all() and (value[~present] == ABSENT).all()
        expect(bool(right), f"scores.{side} is not finite, or scores heads that the model does not have")
        sides.append(value)
    raw = {}
    for name, value in tensors.items():
        expect(name.startswith("raw."), f"it holds an unknown tensor {name[:80]!r}")
        right = value.dtype == torch.float32 and value.ndim == 3 and value.shape[1] in (1, len(counts))
        expect(right, f"{name[:80]} is {form(value)}, wanted [samples, {len(counts)}, heads] float32")
        expect(not bool(value.isinf().any()), f"{name[:80]} holds infinity")
        raw[name.removeprefix("raw.")] = value
    compressed = header.get("compressed")
    expect(isinstance(compressed, bool), "it does not say whether the model was compressed")
    measures = HeadMeasures(config, counts, HeadScores(*sides), raw, compressed, info)
    _check_raw(measures)
    return measures


def _check_raw(measures: HeadMeasures) -> None:
    """Raise ValueError unless the scores are those of the samples' measures, where a selector keeps these."""
    entry = ENTRIES[measures.config.selector]
    if not entry.combined:
        return
    try:
        again = entry.combine()(measures.raw, measures.num_key_value_heads, measures.config)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"its measures do not fit its model: {error}") from error
    close = [torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(again, measures.scores)]
    expect(all(close), "its scores are not those of its measures")
