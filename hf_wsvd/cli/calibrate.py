"""`hf-wsvd calibrate`: a dense model and data in, one file of statistics out, for any number of compressions."""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..calibration import collect_statistics, save_statistics
from ..files import check_output_file, remove_unfinished
from .compress import DTYPES, check_device, find_model, load_dense, load_processor
from .dataset_options import (
    Dataset,
    DatasetName,
    MaxTokens,
    PresetName,
    Samples,
    Seed,
    Split,
    Streaming,
    built_in_batches,
    dataset_batches,
)


def calibrate(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a dense text or vision-language model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write, such as stats.safetensors.")],
    dataset: Dataset = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    preset: PresetName = None,
    streaming: Streaming = False,
    samples: Samples = 64,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    fisher: Annotated[
        bool,
        typer.Option(
            "--fisher/--no-fisher",
            help="Also measure the Fisher information of every weight, 4 bytes each. Only refinement='fisher' needs "
            "it; the default refinement does not.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto keeps the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="Device to calibrate on (cpu, cuda:0), or auto to spread.")] = "cpu",
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder or repository.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Measure what a fit needs to know of a model, once for several compressions; goes on after an interruption."""
    check_output_file(output, overwrite)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    check_device(device)
    source, auto_class = find_model(model, gguf_file)
    processor = load_processor(model, source, auto_class)
    batches = dataset_batches(  # before the weights: data that do not fit fail early
        processor,
        dataset=dataset,
        dataset_name=dataset_name,
        split=split,
        preset=preset,
        streaming=streaming,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
    )
    dense = load_dense(model, source, auto_class, dtype, device)
    if batches is None:
        batches = built_in_batches(dense, processor, samples, max_tokens, seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(output)
    with terminated_like_interrupted():
        try:
            statistics = collect_statistics(dense, batches, fisher=fisher, partial=partial)
        except KeyboardInterrupt:
            if partial.exists():
                typer.echo(f"{partial} holds what was measured; the same command goes on from there", err=True)
            raise
    remove_unfinished(output)
    save_statistics(statistics, output)
    partial.unlink(missing_ok=True)
    info = statistics.info
    typer.echo(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB; {info['samples']:,} sequences, {info['tokens']:,} tokens in "
        f"{len(statistics.gram)} layers, measured in {statistics.dtype}, {'with' if fisher else 'without'} Fisher "
        "information; the calibration inputs are in it"
    )
    arguments = ["hf-wsvd", "compress", model, "-o", "DIR", "--calibration", str(output)]
    arguments += ["--dtype", dtype] if dtype != "auto" else []
    arguments += ["--gguf-file", gguf_file] if gguf_file else []
    typer.echo(f"Next: {shlex.join(arguments)}")


def partial_of(output: Path) -> Path:
    """Where the running state of a calibration lies until it is complete."""
    return output.with_name(f".{output.name}.partial")


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which batch systems send before they kill, ends the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
