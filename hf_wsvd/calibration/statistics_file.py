"""Statistics as one safetensors file. What is read is not trusted."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..tensor_file import Entry, entries, expect, form, read_tensors, write_tensors
from ..version import __version__
from .answers import TOP, Answered
from .cached_run import compared_positions, token_column
from .dense_side import DenseSample
from .samples import MAX_SAMPLES
from .statistics import Statistics, check_statistics_of
from .taken import Taken


FORMAT_VERSION = 1
KEY = "calibration_statistics"  # of the JSON in the file's metadata
MOMENTS = ("output", "weight", "gradient")
MODEL_DTYPES = ("float32", "float16", "bfloat16", "float64")
LONGEST_TEXT = 4096  # of a recorded name


class Stored(Mapping[Hashable, Tensor]):
    """Tensors of a memory-mapped file, converted to `dtype` anew each time one is looked up."""

    def __init__(self, tensors: dict[Hashable, Tensor], dtype: torch.dtype):
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, key: Hashable) -> Tensor:
        return self._tensors[key].to(self._dtype)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def save_statistics(statistics: Statistics, path: str | PathLike[str]) -> None:
    """Write what `collect_statistics` measured as one safetensors file, matrices in fp32; whole or not at all.

    The file holds the calibration inputs (`answered` and `samples`): it is as private as the data are.

    Raises:
        ValueError: statistics without a model's dtype and shape, as only `collect_statistics` fills them in.
        OSError: the file cannot be written.
    """
    if not statistics.decoder_shape or not statistics.dtype:
        raise ValueError("statistics without decoder_shape and dtype cannot be saved: collect_statistics records both")
    matrices = [Entry(f"gram.{n}", torch.float32, lambda n=n: statistics.gram[n]) for n in statistics.gram]
    for kind in (*MOMENTS, "fisher"):
        held = getattr(statistics, kind)
        for layer, side in held:
            read = lambda held=held, key=(layer, side): held[key]  # noqa: E731, one of many
            matrices.append(Entry(f"{kind}.{layer}.{side}", torch.float32, read))
    header = {
        "version": FORMAT_VERSION,
        "decoder_shape": statistics.decoder_shape,
        "dtype": statistics.dtype,
        "info": statistics.info,
        "samples": len(statistics.samples),
        "answered": len(statistics.answered),
        "splits": [sample.split for sample in statistics.samples],
        "probe": None if statistics.probe is None else statistics.probe.split,
        "versions": {"hf_wsvd": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }
    inputs = input_entries([sample.inputs for sample in statistics.samples], statistics.answered)
    for number, sample in enumerate(statistics.samples):
        inputs += entries(f"dense.{number}", {"top": sample.top, "log_probabilities": sample.dense})
    if statistics.probe is not None:
        inputs += entries("probe.inputs", statistics.probe.inputs)
        inputs += entries("probe", {"top": statistics.probe.top, "log_probabilities": statistics.probe.dense})
    write_tensors(Path(path), KEY, header, [*matrices, *inputs])


def load_statistics(path: str | PathLike[str], model: PreTrainedModel | None = None) -> Statistics:
    """Read and check a file of `save_statistics`. Matrices stay in the file and are read as they are looked up.

    Args:
        model: the dense model that is to be fitted; None leaves the comparison with it to the fit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming the file and the cause: truncated, no statistics, a newer format, tensors that are missing,
            of wrong shape or dtype or not finite; statistics of another model, or measured in another dtype.
    """
    path = Path(path)
    header, tensors = read_tensors(path, KEY)
    try:
        statistics = _checked(header, Taken(tensors))
        if model is not None:
            check_statistics_of(statistics, model)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # from torch, on tensors of exotic dtypes
        raise ValueError(f"{path}: {error}") from error
    return statistics


def input_entries(samples: list[dict[str, Tensor]], answered: list[Answered]) -> list[Entry]:
    """What is written of a calibration set's inputs and answers."""
    found = []
    for number, sample in enumerate(samples):
        found += entries(f"samples.{number}", sample)
    for number, group in enumerate(answered):
        found += entries(f"answered.{number}.inputs", group.inputs)
        names = ("positions", "top", "log_probabilities")
        found += entries(f"answered.{number}", {name: getattr(group, name) for name in names})
    return found


def take_inputs(header: dict[str, Any], file: Taken) -> tuple[list[dict[str, Tensor]], list[Answered]]:
    """Samples and answered inputs that `input_entries` wrote."""
    samples, answered = header.get("samples"), header.get("answered")
    expect(is_count(samples) and samples <= MAX_SAMPLES, f"samples={samples!r}, allowed: 0 to {MAX_SAMPLES}")
    # Before the loop: a number without the tensors would keep it busy for ever.
    expect(is_count(answered) and answered <= len(file.left), f"answered={answered!r}")
    found = [file.inputs(f"samples.{number}") for number in range(samples)]
    return found, [_take_answered(file, f"answered.{number}") for number in range(answered)]


def check_record(header: dict[str, Any], version: int) -> None:
    """Raise ValueError unless a header has this format version, a decoder shape and a dtype."""
    found = header.get("version")
    expect(found == version, f"format version {found!r}, this hf_wsvd reads {version}")
    shape = header.get("decoder_shape")
    expect(isinstance(shape, dict) and "model_type" in shape and _is_plain(shape), f"decoder_shape={shape!r}")
    expect(header.get("dtype") in MODEL_DTYPES, f"dtype={header.get('dtype')!r}, allowed: {', '.join(MODEL_DTYPES)}")


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked(header: dict[str, Any], file: Taken) -> Statistics:
    check_record(header, FORMAT_VERSION)
    info = header.get("info")
    counts = isinstance(info, dict) and all(is_count(info.get(name)) for name in ("samples", "tokens"))
    expect(counts and isinstance(info.get("sha256"), str) and _is_plain(info), f"info={info!r}")
    inputs, answered = take_inputs(header, file)
    splits, probe = header.get("splits"), header.get("probe")
    expect(isinstance(splits, list) and len(splits) == len(inputs), f"splits={splits!r} of {len(inputs)} samples")
    samples = [_take_dense(file, f"dense.{n}", *pair) for n, pair in enumerate(zip(inputs, splits))]
    probed = None if probe is None else _take_dense(file, "probe", file.inputs("probe.inputs"), probe)
    layers = sorted(int(name[5:]) for name in file.left if re.fullmatch(r"gram\.\d{1,5}", name))
    expect(bool(layers), "it holds no second moment of any layer")
    found: dict[str, dict[Hashable, Tensor]] = {kind: {} for kind in ("gram", *MOMENTS, "fisher")}
    measured = any(name.startswith("fisher.") for name in file.left)
    for layer in layers:
        gram = file.take(f"gram.{layer}", torch.float32, (None, None))
        expect(gram.shape[0] == gram.shape[1], f"gram.{layer} is {form(gram)}")
        found["gram"][layer] = gram
        for side in "qkv":
            if side == "q" and f"weight.{layer}.q" not in file.left:
                continue
            shape: tuple[int | None, ...] = (None, None, None)
            for kind in MOMENTS:
                value = file.take(f"{kind}.{layer}.{side}", torch.float32, shape)
                shape = tuple(value.shape)
                expect(shape[1] == shape[2], f"{kind}.{layer}.{side} is {form(value)}")
                found[kind][layer, side] = value
            if measured:
                rows = shape[0] * shape[1]
                value = file.take(f"fisher.{layer}.{side}", torch.float32, (rows, len(gram)))
                expect(bool((value >= 0).all()), f"fisher.{layer}.{side} is negative")
                found["fisher"][layer, side] = value
    for kind in ("gram", *MOMENTS):
        for key, value in found[kind].items():
            expect(bool((value.diagonal(dim1=-2, dim2=-1) >= 0).all()), f"{kind} of {key} is no second moment")
    file.finish()
    stored = {kind: Stored(held, torch.float64) for kind, held in found.items() if kind != "fisher"}
    return Statistics(
        **stored,
        fisher=Stored(found["fisher"], torch.float32),
        answered=answered,
        samples=samples,
        probe=probed,
        info=info,
        decoder_shape=header["decoder_shape"],
        dtype=header["dtype"],
    )


def _take_answered(file: Taken, prefix: str) -> Answered:
    inputs = file.inputs(f"{prefix}.inputs")
    rows, tokens = inputs.get("input_ids", inputs.get("inputs_embeds")).shape[:2]
    positions = file.take(f"{prefix}.positions", torch.bool, (rows, max(tokens - 1, 0)))
    count = int(positions.sum())
    top, value = _take_answers(file, prefix, count)
    return Answered(inputs, positions, top, value)


def _take_dense(file: Taken, prefix: str, inputs: dict[str, Tensor], split: Any) -> DenseSample:
    length = token_column(inputs).shape[1]
    expect(is_count(split) and 0 < split < length, f"{prefix} is split at {split!r} of {length} tokens")
    top, value = _take_answers(file, prefix, int(compared_positions(inputs).sum()))
    return DenseSample(inputs, split, top, value)


def _take_answers(file: Taken, prefix: str, count: int) -> tuple[Tensor, Tensor]:
    """Most likely tokens `[count, K]` and log-probabilities `[count, K + 1]`."""
    top = file.take(f"{prefix}.top", torch.int32, (count, None))
    expect(count > 0 and 1 <= top.shape[1] <= TOP and int(top.min()) >= 0, f"{prefix}.top is {form(top)}")
    name = f"{prefix}.log_probabilities"
    value = file.left.pop(name, None)
    expect(value is not None and value.dtype == torch.float32, f"it lacks {name} in float32")
    expect(value.shape == (count, top.shape[1] + 1), f"{name} is {form(value)}, wanted {[count, top.shape[1] + 1]}")
    # The sums of probabilities, NaN included; an answer that cannot be has a logarithm of minus infinity.
    expect(bool(((value.double().exp().sum(1) - 1).abs() < 1e-2).all()), f"{name} are no log-probabilities")
    return top, value


def _is_plain(record: dict[str, Any]) -> bool:
    """Whether a JSON record holds short texts, numbers, None and lists of numbers alone."""
    return all(
        value is None
        or (isinstance(value, str) and len(value) <= LONGEST_TEXT)
        or isinstance(value, int | float)
        or (isinstance(value, list) and len(value) <= LONGEST_TEXT and all(isinstance(n, int) for n in value))
        for value in record.values()
    )
