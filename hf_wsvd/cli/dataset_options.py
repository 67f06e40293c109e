"""Options that name calibration data, the same for every command that calibrates, and their loading."""

import sys
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel

from ..calibration import CalibrationSet, default_calibration, load_calibration


Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", help="Hub id, folder, or .json, .jsonl, .parquet, .csv, .txt file. Default: a built-in set."
    ),
]
DatasetName = Annotated[str | None, typer.Option("--dataset-name", help="Configuration of a data set with several.")]
Split = Annotated[str | None, typer.Option("--split", help="Split of the data set. Default: train.")]
PresetName = Annotated[
    str | None,
    typer.Option("--preset", help="messages, scienceqa, question, image or text. Default: chosen by the columns."),
]
Streaming = Annotated[bool, typer.Option("--streaming", help="Read a large data set without downloading it whole.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Calibration sequences.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help="Tokens of a sequence, at most. Default: 512 of text, 4096 of a conversation."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the choice of rows, or of the built-in set.")]


def dataset_batches(
    processor: Any,
    *,
    dataset: str | None,
    dataset_name: str | None,
    split: str | None,
    preset: str | None,
    streaming: bool,
    samples: int,
    max_tokens: int | None,
    seed: int,
) -> CalibrationSet | None:
    """What `--dataset` names, as `load_calibration` reads it; None if it is not given.

    Raises ValueError for options that say nothing without `--dataset`, and what `load_calibration` raises.
    """
    if dataset is None:
        given = {"--dataset-name": dataset_name, "--split": split, "--preset": preset, "--streaming": streaming}
        lone = [option for option, value in given.items() if value]
        if lone:
            raise ValueError(f"{', '.join(lone)} needs --dataset")
        return None
    _quieten_datasets()
    return load_calibration(
        dataset,
        processor,
        name=dataset_name,
        split=split or "train",
        preset=preset,
        streaming=streaming,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
    )


def built_in_batches(
    model: PreTrainedModel, processor: Any, samples: int, max_tokens: int | None, seed: int
) -> CalibrationSet:
    """The built-in calibration set, for where no `--dataset` is given."""
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    return default_calibration(model, processor, samples=samples, seed=seed, **limit)


def _quieten_datasets() -> None:
    """An error of a command is one line: `datasets` logs some that it raises too. Bars are for terminals."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
