"""Statistics as a file: round trip, bad files, and calibration that goes on after any interruption."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_wsvd
from hf_wsvd.calibration import Statistics
from hf_wsvd.calibration.grouping import groups_of
from hf_wsvd.calibration.statistics_file import KEY


MATRICES = ("gram", "output", "weight", "gradient", "fisher")
CONFIG = {"rank_multiple": 4, "refinement_steps": 2}


def batches(family: str = "llama", count: int = 6) -> list[dict[str, Tensor]]:
    """Two rows each; masks by turns there or not, so that most batches are a group of their own."""
    found = [tiny_models.prompt(family, batch=2, tokens=14, seed=seed) for seed in range(count)]
    for batch in found[::3]:
        del batch["attention_mask"]
    return found


def assert_same(first: Statistics, second: Statistics, exact: bool = True) -> None:
    for kind in MATRICES:
        one, other = getattr(first, kind), getattr(second, kind)
        assert set(one) == set(other)
        for key in one:
            assert (one[key].dtype, one[key].shape) == (other[key].dtype, other[key].shape)
            tolerance = 0 if exact else 1e-6
            torch.testing.assert_close(one[key], other[key], rtol=tolerance, atol=tolerance**2)
    assert (first.info, first.decoder_shape, first.dtype) == (second.info, second.decoder_shape, second.dtype)
    fields = {"answered": ("positions", "top", "log_probabilities"), "samples": ("top", "dense")}
    for kind, names in fields.items():
        assert len(getattr(first, kind)) == len(getattr(second, kind)) > 0
        for one, other in zip(getattr(first, kind), getattr(second, kind)):
            assert one.inputs.keys() == other.inputs.keys()
            assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
            assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    assert [sample.split for sample in first.samples] == [sample.split for sample in second.samples]
    assert torch.equal(first.probe.dense, second.probe.dense)


# The file -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory, dense) -> Path:
    """Statistics of `dense("llama")` with Fisher information."""
    path = tmp_path_factory.mktemp("statistics") / "stats.safetensors"
    hf_wsvd.save_statistics(hf_wsvd.collect_statistics(dense("llama"), batches(), fisher=True), path)
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_a_round_trip_keeps_everything(family, dense, tmp_path):
    measured = hf_wsvd.collect_statistics(dense(family), tiny_models.calibration_batches(family), fisher=True)
    hf_wsvd.save_statistics(measured, tmp_path / "stats.safetensors")
    loaded = hf_wsvd.load_statistics(str(tmp_path / "stats.safetensors"), dense(family))
    assert_same(loaded, measured, exact=False)
    hf_wsvd.save_statistics(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "stats.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.safetensors", "stats.safetensors"]
    with safe_open(tmp_path / "stats.safetensors", "pt") as opened:
        assert {str(opened.get_tensor(f"gram.{layer}").dtype) for layer in range(3)} == {"torch.float32"}


def test_a_file_compresses_as_its_statistics_do(file, dense):
    measured = hf_wsvd.collect_statistics(dense("llama"), batches())
    models = [
        hf_wsvd.compress(copy.deepcopy(dense("llama")), hf_wsvd.WSVDConfig(**CONFIG, **config), **arguments)
        for config, arguments in (
            ({}, {"statistics": measured}),
            ({}, {"statistics": file}),
            ({"calibration": str(file)}, {}),
            ({}, {"calibration": file}),
        )
    ]
    records = [model.config.quantization_config for model in models]
    assert all((r.k_rank, r.v_rank) == (records[0].k_rank, records[0].v_rank) for r in records)
    assert all(r.calibration_info == measured.info for r in records)
    ids = tiny_models.prompt("llama")["input_ids"]
    for model in models[1:]:
        torch.testing.assert_close(model(ids).logits, models[0](ids).logits, rtol=1e-2, atol=1e-2)


def test_from_pretrained_takes_a_file(file, dense, tmp_path):
    from transformers import AutoModelForCausalLM

    dense("llama").save_pretrained(tmp_path)
    config = hf_wsvd.WSVDConfig(**CONFIG, calibration=str(file))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert model.config.quantization_config.calibration_info["samples"] == 12
    assert "stats.safetensors" not in json.dumps(model.config.to_dict(), default=str)


def test_fisher_refinement_from_a_file(file, dense, statistics, tmp_path):
    config = hf_wsvd.WSVDConfig(rank_multiple=4, refinement="fisher")
    model = hf_wsvd.compress(copy.deepcopy(dense("llama")), config, statistics=file)
    losses = model.config.quantization_config.fit_info["fisher_loss"].values()
    assert all(loss["after"] <= loss["before"] for loss in losses)
    hf_wsvd.save_statistics(statistics("llama"), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="hold none: collect them with fisher=True"):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), config, statistics=tmp_path / "plain.safetensors")


def test_another_model_or_dtype_is_refused(file, dense):
    with pytest.raises(ValueError, match=r"stats.safetensors: .*another model \(llama\): num_key_value_heads=\[2\]"):
        hf_wsvd.load_statistics(file, dense("llama_mha"))
    half = copy.deepcopy(dense("llama")).bfloat16()
    message = "measured in float32, the model is bfloat16: calibrate again, or load the model with dtype='float32'"
    with pytest.raises(ValueError, match=f"stats.safetensors: .*{message}"):
        hf_wsvd.load_statistics(file, half)
    with pytest.raises(ValueError, match=message):
        hf_wsvd.compress(half, statistics=hf_wsvd.load_statistics(file))
    other = tiny_models.build("llama", seed=1)
    with pytest.raises(ValueError, match="its weights are others"):
        hf_wsvd.compress(other, statistics=file)
    short = copy.deepcopy(dense("llama"))
    short.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="another model: they hold the token ids"):
        hf_wsvd.load_statistics(file, short)


def test_statistics_without_a_model_are_not_saved(statistics, tmp_path):
    with pytest.raises(ValueError, match="decoder_shape and dtype"):
        hf_wsvd.save_statistics(Statistics(statistics("llama").gram), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0, 1e-4, 0.01, 0.5, 0.999])
def test_truncated_files_are_refused(share, file, tmp_path):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"cut\.safetensors is not a readable calibration statistics file \(trunc"):
        hf_wsvd.load_statistics(cut)


def test_files_that_are_none(tmp_path, dense):
    with pytest.raises(ValueError, match=r"none\.safetensors' does not exist"):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), statistics=tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="not a readable"):
        hf_wsvd.load_statistics(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match=r"foreign\.safetensors .*it holds no calibration statistics"):
        hf_wsvd.load_statistics(tmp_path / "foreign.safetensors")


def set_version(header, tensors):
    header["version"] = 99


def set_dtype(header, tensors):
    header["dtype"] = "int8"


def set_answered(header, tensors):
    header["answered"] = 10**12


def set_info(header, tensors):
    header["info"] = {"samples": -1}


def set_shape(header, tensors):
    header["decoder_shape"] = [1]


def drop_gradient(header, tensors):
    del tensors["gradient.1.k"]


def drop_layer(header, tensors):
    del tensors["gram.1"]


def drop_fisher(header, tensors):
    del tensors["fisher.0.v"]


def drop_top(header, tensors):
    del tensors["answered.0.top"]


def cut_gram(header, tensors):
    tensors["gram.0"] = tensors["gram.0"][:5].clone()


def halve_gram(header, tensors):
    tensors["gram.0"] = tensors["gram.0"].half()


def spoil_gram(header, tensors):
    tensors["gram.0"][1, 1] = float("nan")


def negate_fisher(header, tensors):
    tensors["fisher.0.k"] = tensors["fisher.0.k"] - 1


def negate_gram(header, tensors):
    tensors["gram.0"] = -tensors["gram.0"]


def negate_ids(header, tensors):
    tensors["samples.0.input_ids"] -= 1000


def spoil_probabilities(header, tensors):
    tensors["answered.0.log_probabilities"][0, 0] = float("nan")


def add_cache(header, tensors):
    tensors["samples.0.past_key_values"] = torch.zeros(1)


def add_tensor(header, tensors):
    tensors["surprise"] = torch.zeros(1)


CHANGES = {
    set_version: "format version 99",
    set_dtype: "dtype='int8'",
    set_answered: "answered=1000000000000",
    set_info: "info=",
    set_shape: "decoder_shape=",
    drop_gradient: "lacks gradient.1.k",
    drop_layer: "unknown tensors",
    drop_fisher: "lacks fisher.0.v",
    drop_top: "lacks answered.0.top",
    cut_gram: r"gram.0 is \[5, 48\]",
    halve_gram: r"gram.0 is \[48, 48\] float16, wanted",
    spoil_gram: "gram.0 is not finite",
    negate_fisher: "fisher.0.k is negative",
    negate_gram: "no second moment",
    negate_ids: "negative token ids",
    spoil_probabilities: "no log-probabilities",
    add_cache: "an input 'past_key_values'",
    add_tensor: "unknown tensors: surprise",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_damaged_contents_are_named(change, file, tmp_path):
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()[KEY])
    tensors = load_file(file)
    change(header, tensors)
    save_file(tensors, tmp_path / "bad.safetensors", metadata={KEY: json.dumps(header)})
    with pytest.raises(ValueError, match=rf"bad\.safetensors: .*{CHANGES[change]}"):
        hf_wsvd.load_statistics(tmp_path / "bad.safetensors")


# Interruptions ------------------------------------------------------------------------------------------------------


def interrupted(data: list, after: int, error: BaseException) -> Iterator[dict[str, Tensor]]:
    yield from data[:after]
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is gone")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_an_interrupted_calibration_goes_on_bit_for_bit(after, error, dense, tmp_path):
    data, partial = batches(), tmp_path / "partial"
    assert [len(group) for group in groups_of(data, max_tokens=1024)] == [1, 2, 1, 2]
    whole = hf_wsvd.collect_statistics(dense("llama"), data, fisher=True)
    with pytest.raises(type(error)):
        hf_wsvd.collect_statistics(dense("llama"), interrupted(data, after, error), fisher=True, partial=partial)
    done = {1: 0, 3: 1, 5: 4}[after]  # of whole groups: the last batch that was read may be one of a larger group
    assert partial.exists() == (done > 0)
    if done:
        with safe_open(partial, "pt") as opened:
            assert json.loads(opened.metadata()["unfinished_calibration"])["batches"] == done
    resumed = hf_wsvd.collect_statistics(dense("llama"), data, fisher=True, partial=partial)
    assert_same(resumed, whole)
    # The result was not stored yet: all of it is on disk, and nothing is measured again.
    assert_same(hf_wsvd.collect_statistics(dense("llama"), data, fisher=True, partial=partial), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


def test_several_interruptions_and_labels_that_come_late(dense, tmp_path):
    """Gradients have no sum until the first answer."""
    data, partial = batches("qwen2_vl"), tmp_path / "partial"
    for batch in data:
        batch["labels"] = batch["input_ids"].clone()
    for batch in data[:3]:
        batch["labels"][:] = -100
    whole = hf_wsvd.collect_statistics(dense("qwen2_vl"), data)
    for after in (2, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            hf_wsvd.collect_statistics(
                dense("qwen2_vl"), interrupted(data, after, KeyboardInterrupt()), partial=partial, save_every=0
            )
    assert_same(hf_wsvd.collect_statistics(dense("qwen2_vl"), iter(data), partial=partial), whole)


def test_ctrl_c_waits_for_the_end_of_a_group(dense, tmp_path, monkeypatch):
    model, data, partial = copy.deepcopy(dense("llama")), batches(), tmp_path / "partial"
    whole = hf_wsvd.collect_statistics(model, data)
    calls = []

    def press(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    handle = model.model.layers[1].register_forward_pre_hook(press)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hf_wsvd.collect_statistics(model, data, partial=partial)
    handle.remove()
    assert signal.getsignal(signal.SIGINT) is handler
    assert partial.exists()
    assert_same(hf_wsvd.collect_statistics(model, data, partial=partial), whole)


def test_an_error_in_the_middle_of_a_group_keeps_the_last_state(dense, tmp_path):
    model, data, partial = copy.deepcopy(dense("llama")), batches(), tmp_path / "partial"
    whole = hf_wsvd.collect_statistics(model, data)
    calls = []

    def fail(*args):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        hf_wsvd.collect_statistics(model, data, partial=partial, save_every=0)
    handle.remove()
    assert_same(hf_wsvd.collect_statistics(model, data, partial=partial), whole)


SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
import tiny_models, hf_wsvd
from test_statistics_file import batches

def slow():
    for batch in batches():
        yield batch
        time.sleep(0.3)

hf_wsvd.collect_statistics(tiny_models.build("llama"), slow(), fisher=True, partial={partial!r}, save_every=0)
"""


@pytest.mark.parametrize("written", [1, 2])
def test_a_killed_calibration_goes_on_bit_for_bit(written, dense, tmp_path):
    partial = tmp_path / "partial"
    script = SLOW.format(tests=str(Path(__file__).parent), partial=str(partial))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    stamps: set[int] = set()
    deadline = time.monotonic() + 120
    while len(stamps) < written and process.poll() is None and time.monotonic() < deadline:
        if partial.exists():
            stamps.add(partial.stat().st_mtime_ns)
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (tmp_path / ".partial.partial-abc").write_text("what a kill in the middle of a write leaves")
    resumed = hf_wsvd.collect_statistics(dense("llama"), batches(), fisher=True, partial=partial)
    assert_same(resumed, hf_wsvd.collect_statistics(dense("llama"), batches(), fisher=True))
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


@pytest.fixture
def partial(dense, tmp_path) -> Path:
    """What an interrupted calibration of `dense("llama")` on `batches()` left."""
    data = interrupted(batches(), 4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hf_wsvd.collect_statistics(dense("llama"), data, partial=tmp_path / "partial")
    return tmp_path / "partial"


def test_what_does_not_fit_an_unfinished_calibration_is_refused(partial, dense):
    before = partial.read_bytes()
    changed = batches()
    changed[0]["input_ids"][0, 0] += 1
    cases = [
        (dense("llama"), changed, {}, "other calibration data"),
        (dense("llama"), batches()[:2], {}, "more calibration data than these"),
        (dense("llama"), batches(), {"fisher": True}, "measured with fisher=False, not True"),
        (dense("llama"), batches(), {"keep_answers": False}, "measured with keep_answers=True, not False"),
        (dense("llama_mha"), batches(), {}, "another model"),
        (tiny_models.build("llama", seed=1), batches(), {}, "the weights are others"),
        (copy.deepcopy(dense("llama")).bfloat16(), batches(), {}, "measured in float32, the model is bfloat16"),
    ]
    for model, data, options, message in cases:
        with pytest.raises(ValueError, match=rf"partial holds an unfinished .*{message}.*remove it to start anew"):
            hf_wsvd.collect_statistics(model, data, partial=partial, **options)
        assert partial.read_bytes() == before
    partial.write_bytes(before[:-10])
    with pytest.raises(ValueError, match=r"partial is not a readable unfinished calibration file \(truncated"):
        hf_wsvd.collect_statistics(dense("llama"), batches(), partial=partial)


def test_resuming_says_so(partial, dense, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("hf_wsvd.calibration.progress.logger.warning", lines.append)
    hf_wsvd.collect_statistics(dense("llama"), batches(), partial=partial)
    assert len(lines) == 1
    assert "6 sequences (84 tokens) were measured before" in lines[0]


def test_a_full_disk_warns_and_calibration_goes_on(dense, tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("hf_wsvd.calibration.progress.logger.warning", lines.append)

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr("hf_wsvd.calibration.progress.write_tensors", full)
    found = hf_wsvd.collect_statistics(dense("llama"), batches(), partial=tmp_path / "partial", save_every=0)
    assert found.info["samples"] == 12
    assert "no space left" in lines[0]
