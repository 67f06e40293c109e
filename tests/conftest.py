"""Shared fixtures: tiny models of every family, dense, compressed and merged, built once a session."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache


# Read when huggingface_hub is imported: no test may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Read when datasets is imported: what tests load does not pile up in the user's cache.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()

import pytest
import tiny_models
import torch
from gluon_emulator.process import emulating_process
from interpreting import interpreting_process
from transformers import PreTrainedModel
from transformers.utils import logging

import hf_wsvd
from hf_wsvd import attention
from hf_wsvd.calibration import Statistics
from hf_wsvd.kernels import dispatch


Factory = Callable[..., PreTrainedModel]

logging.disable_progress_bar()
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """The same random numbers in every test, whichever tests ran before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@cache
def _dense(family: str) -> PreTrainedModel:
    return tiny_models.build(family)


@cache
def _statistics(family: str) -> Statistics:
    return hf_wsvd.collect_statistics(_dense(family), tiny_models.calibration_batches(family))


@cache
def _compressed(family: str, rank_ratio: float | None, options: tuple) -> PreTrainedModel:
    config = hf_wsvd.WSVDConfig(rank_ratio=rank_ratio, **{**tiny_models.CLOSED_FORM, **dict(options)})
    return hf_wsvd.compress(copy.deepcopy(_dense(family)), config, statistics=_statistics(family))


@cache
def _merged(family: str, rank_ratio: float | None, options: tuple) -> PreTrainedModel:
    return copy.deepcopy(_compressed(family, rank_ratio, options)).dequantize()


def _forgetful(model: PreTrainedModel) -> PreTrainedModel:
    """The model without what other tests that had it left there.

    M-RoPE families remember the last image. Transformers hooks the layers when hidden states are first asked for, and
    leaves its hooks, which pickle refuses.
    """
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
        vars(module).pop("_output_capturing_hooks_installed", None)
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                del module._forward_hooks[number]
    return model


@pytest.fixture(scope="session")
def dense() -> Factory:
    """`dense(family)`: the random model that every other fixture starts from. Shared: copy before changing it."""
    return lambda family: _forgetful(_dense(family))


@pytest.fixture(scope="session")
def statistics() -> Callable[[str], Statistics]:
    """`statistics(family)`: what calibration measured on `dense(family)`."""
    return _statistics


@pytest.fixture(scope="session")
def compressed() -> Factory:
    """`compressed(family, rank_ratio=0.5, **hashable_config_fields)`. Shared: copy before changing it."""
    return lambda family, rank_ratio=0.5, **options: _forgetful(
        _compressed(family, rank_ratio, tuple(sorted(options.items())))
    )


@pytest.fixture(scope="session")
def merged() -> Factory:
    """`merged(family, rank_ratio=0.5, ...)`: the plain model with the weights `U_h D_h` of `compressed(...)`."""
    return lambda family, rank_ratio=0.5, **options: _forgetful(
        _merged(family, rank_ratio, tuple(sorted(options.items())))
    )


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """`interpreted(function, *args)`, run in a process in which Triton interprets kernels on the CPU."""
    with interpreting_process() as run:
        yield run


@pytest.fixture(scope="session")
def emulated() -> Iterator[Callable]:
    """`emulated(function, *args)`, run in a process in which Gluon is emulated on the CPU."""
    with emulating_process() as run:
        yield run


@pytest.fixture
def by_definition(monkeypatch) -> None:
    """Decode kernels are chosen on the CPU, and their definition in fp64 stands in for them."""
    from kernel_models import checked_definition

    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)  # stores look elsewhere, and stay in torch
    monkeypatch.setattr(attention, "fused_attention", checked_definition)


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Loading fails as soon as a weight would be read."""

    def reading(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", reading)
