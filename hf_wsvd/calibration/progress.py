"""A calibration that was interrupted goes on where it was: its running state as a file."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..decoder import decoder_shape
from ..files import remove_unfinished
from ..tensor_file import Entry, expect, read_tensors, write_tensors
from .batches import Batch
from .data import Contents
from .statistics import check_same_model, dtype_name
from .statistics_file import check_record, input_entries, is_count, take_inputs
from .taken import Taken


if TYPE_CHECKING:
    from .collector import Collector

logger = logging.get_logger("hf_wsvd")

FORMAT_VERSION = 1
KEY = "unfinished_calibration"  # of the JSON in the file's metadata
OPTIONS = ("fisher", "keep_answers")
COUNTS = ("tokens", "sequences", "labelled")
VALUES_OF_A_WEIGHT = 64  # that tell a model from another of the same shape


class Progress:
    """The state of a `Collector` between two groups of sequences, read from and written to a file.

    Args:
        path: None keeps nothing.
        save_every: seconds between two writes.
    """

    def __init__(self, collector: Collector, path: str | PathLike[str] | None, save_every: float):
        self.collector, self.save_every = collector, save_every
        self.path = None if path is None else Path(path)
        self.contents = Contents()
        self._weights = "" if path is None else fingerprint(collector.model)
        self._saved = time.monotonic()
        self._seconds_to_save = 0.0
        self._consistent = True
        self._batches_saved = 0

    def resume(self, batches: Iterator[Batch]) -> None:
        """If there is a file, take its state and read off `batches` what it has seen.

        Raises ValueError if the file is damaged or belongs to another model, other options or other data.
        """
        if self.path is None:
            return
        if self.path.is_dir() or not os.access(self.path.absolute().parent, os.W_OK | os.X_OK):
            raise ValueError(f"partial={str(self.path)!r} cannot be written: it must be a file in a folder that can")
        remove_unfinished(self.path)
        if not self.path.exists():
            return
        header, tensors = read_tensors(self.path, KEY)
        try:
            self._check(header)
            self._take(header, Taken(tensors))
            for _ in range(header["batches"]):
                batch = next(batches, None)
                expect(batch is not None, "it was measured on more calibration data than these")
                self.contents.add(batch)
            expect(self.contents.info() == header["contents"], "it was measured on other calibration data")
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{self.path} holds an unfinished calibration that cannot go on: {error}; remove it to start anew"
            ) from error
        self._batches_saved = self.contents.batches
        logger.warning(
            f"hf_wsvd: calibration goes on from {self.path}: {self.contents.samples:,} sequences "
            f"({self.contents.tokens:,} tokens) were measured before"
        )

    @contextmanager
    def group(self, members: list[Batch]) -> Iterator[None]:
        """Inside, the collector takes these batches; Ctrl-C waits until it has, so that nothing is lost."""
        with _interrupts_deferred(self.path is not None):
            self._consistent = False
            yield
            for batch in members:
                self.contents.add(batch)
            self._consistent = True
        # A large state takes long to write: at most a twentieth of the time goes into it.
        if time.monotonic() - self._saved >= max(self.save_every, 20 * self._seconds_to_save):
            self.save()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever ends the block early, the state of the last whole group is on disk afterwards.

        An error in the middle of a group leaves half-added sums: then the last write stays.
        """
        try:
            yield
        except BaseException:
            if self._consistent:
                self.save()
            raise

    def save(self) -> None:
        """Write the state, if there is any that is not on disk. A disk that is full is no reason to stop: it warns."""
        if self.path is None or self.contents.batches == self._batches_saved:
            return
        collector, begin = self.collector, time.monotonic()
        header = {
            "version": FORMAT_VERSION,
            "decoder_shape": decoder_shape(collector.model),
            "dtype": dtype_name(collector.model),
            "weights": self._weights,
            "batches": self.contents.batches,
            "contents": self.contents.info(),
            "samples": len(collector.samples),
            "answered": len(collector.answered),
            **{name: getattr(collector, name) for name in (*OPTIONS, *COUNTS)},
        }
        sums = [
            Entry(_name(key), torch.float64, lambda value=value: value) for key, value in collector.sums.values.items()
        ]
        try:
            write_tensors(self.path, KEY, header, [*sums, *input_entries(collector.samples, collector.answered)])
            self._batches_saved = self.contents.batches
        except OSError as error:
            logger.warning(f"hf_wsvd: the unfinished calibration cannot be written to {self.path}: {error}")
        self._saved = time.monotonic()
        self._seconds_to_save = self._saved - begin

    def _check(self, header: dict[str, Any]) -> None:
        check_record(header, FORMAT_VERSION)
        check_same_model(header["decoder_shape"], header["dtype"], self.collector.model)
        expect(header.get("weights") == self._weights, "it was measured on another model: the weights are others")
        for name in OPTIONS:
            wanted = getattr(self.collector, name)
            expect(header.get(name) == wanted, f"it was measured with {name}={header.get(name)!r}, not {wanted}")
        for name in ("batches", *COUNTS):
            expect(is_count(header.get(name)), f"{name}={header.get(name)!r}")

    def _take(self, header: dict[str, Any], file: Taken) -> None:
        collector, values = self.collector, {}
        for key, shape in collector.sum_shapes().items():
            # Copies: a memory map would keep hold of a file that is about to be replaced.
            if _name(key) in file.left:  # gradients are measured at the first answer
                values[key] = file.take(_name(key), torch.float64, shape).clone()
        samples, answered = take_inputs(header, file)
        file.finish()
        collector.sums.resume(values)
        collector.samples = [_copy(sample) for sample in samples]
        collector.answered = [
            type(a)(_copy(a.inputs), a.positions.clone(), a.top.clone(), a.log_probabilities.clone()) for a in answered
        ]
        for name in COUNTS:
            setattr(collector, name, header[name])


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of a few values of every weight."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            continue
        flat = parameter.detach().reshape(-1)
        values = flat[:: max(len(flat) // VALUES_OF_A_WEIGHT, 1)][:VALUES_OF_A_WEIGHT].cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)};".encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _name(key: tuple[str, Hashable]) -> str:
    """Of a sum in the file: `sums.gram.3`, `sums.fisher.3.v`."""
    kind, of = key
    return ".".join(["sums", kind, *map(str, of if isinstance(of, tuple) else (of,))])


def _copy(batch: Batch) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in batch.items()}


@contextmanager
def _interrupts_deferred(wanted: bool) -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt at the end of the block; a second one raises at once."""
    main = threading.current_thread() is threading.main_thread()
    if not wanted or not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    caught = False

    def note(number: int, frame: Any) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt
